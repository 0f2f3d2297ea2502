# The worker, for processors or for CUDA. From the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile --target cpu -t fdfo-worker-cpu:0.1.0 .
#   docker build -f deploy/docker/worker.Dockerfile --target cuda -t fdfo-worker-cuda:0.1.0 .
# The usual index has torch with CUDA (some gigabytes); for a small image for processors give the index of PyTorch's own
# CPU wheels: --build-arg TORCH_INDEX_URL=... Another index or a folder of wheels: see scheduler.Dockerfile.
FROM docker.io/library/python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY common/__init__.py common/
RUN python3 -m venv /opt/fdfo

FROM build AS packages-cpu
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL
RUN /opt/fdfo/bin/pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH" \
 && /opt/fdfo/bin/pip install '.[worker,tracing]' \
 && /opt/fdfo/bin/pip uninstall --yes fdfo
COPY . .
RUN /opt/fdfo/bin/pip install --no-deps . \
 && mkdir /opt/fdfo/models && cp -r models/tiny-llada2 /opt/fdfo/models/

FROM build AS packages-cuda
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ARG TORCH=torch==2.13.0
RUN /opt/fdfo/bin/pip install "$TORCH" \
 && /opt/fdfo/bin/pip install '.[worker,tracing,flashinfer]' \
 && /opt/fdfo/bin/pip uninstall --yes fdfo
COPY . .
RUN /opt/fdfo/bin/pip install --no-deps . \
 && mkdir /opt/fdfo/models && cp -r models/tiny-llada2 /opt/fdfo/models/

FROM docker.io/library/python:3.11-slim-bookworm AS runtime
ENV PATH=/opt/fdfo/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
USER 65532:65532
EXPOSE 50052
ENTRYPOINT ["python3", "-m", "worker_svc"]

# CUDA's libraries come with torch, the driver from the node. Triton compiles C at its first kernel (the launcher and its
# calls of the driver), so a compiler and the headers of libc are here; Python's own are in the base image. nvcc is not:
# torch and Triton need none, and FlashInfer's kernels are compiled before (deploy/k8s/README.md).
FROM runtime AS cuda
USER 0:0
RUN apt-get update \
 && apt-get install --yes --no-install-recommends 'gcc=4:12.*' 'libc6-dev=2.36-*' \
 && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-cuda /opt/fdfo /opt/fdfo

FROM runtime AS cpu
COPY --from=packages-cpu /opt/fdfo /opt/fdfo
