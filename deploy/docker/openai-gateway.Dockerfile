# The gateway smg, for OpenAI clients. It needs nothing of this repository:
#   docker build -f deploy/docker/openai-gateway.Dockerfile -t fdfo-openai-gateway:0.1.0 .
# Another index or a folder of wheels: see scheduler.Dockerfile.
FROM docker.io/library/python:3.11-slim-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/smg \
 && /opt/smg/bin/pip install smg==1.13.0

FROM docker.io/library/python:3.11-slim-bookworm
COPY --from=build /opt/smg /opt/smg
ENV PATH=/opt/smg/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["smg", "launch"]
