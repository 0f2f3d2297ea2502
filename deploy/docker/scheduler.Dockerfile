# The scheduler, the client library and the command fdfo; no torch. From the repository's root:
#   docker build -f deploy/docker/scheduler.Dockerfile -t fdfo-scheduler:0.1.0 .
# Another package index, or a folder of wheels without network: --build-arg PIP_INDEX_URL=...,
# PIP_NO_INDEX=1 with PIP_FIND_LINKS=... (pip's own variables).
FROM docker.io/library/python:3.11-slim-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
# Packages change seldom, the code often: they are a layer of their own.
COPY pyproject.toml README.md LICENSE ./
COPY common/__init__.py common/
RUN python3 -m venv /opt/fdfo \
 && /opt/fdfo/bin/pip install '.[scheduler,gateway,tracing]' \
 && /opt/fdfo/bin/pip uninstall --yes fdfo
COPY . .
RUN /opt/fdfo/bin/pip install --no-deps . \
 && mkdir /opt/fdfo/models && cp -r models/tiny-llada2 /opt/fdfo/models/ \
 && /opt/fdfo/bin/pip uninstall --yes setuptools pip

FROM docker.io/library/python:3.11-slim-bookworm
COPY --from=build /opt/fdfo /opt/fdfo
ENV PATH=/opt/fdfo/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 50051
ENTRYPOINT ["python3", "-m", "scheduler_svc"]
