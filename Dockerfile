# Megatron-core with its optimizer state on NVMe, on a base that has torch.
#
# `build.py image` builds this (docs/image.md). The context is not this repository but the directory
# it makes: the wheel, its hash, and `megatron-nvme`, which does the work and stays in the image.
# Nothing is patched here and nothing comes from a network; a step that fails, fails the build.

# By tag: its digest could not be asked for where this was written. Give one for an image that can
# be made again: build.py image --base nvcr.io/nvidia/pytorch:26.03-py3@sha256:...
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${BASE_IMAGE}

COPY --chmod=0755 megatron-nvme /usr/local/bin/megatron-nvme

ARG VERSION
ARG UPSTREAM
ARG SERIES
ARG TREE
ARG SHA256
RUN --mount=type=bind,target=/context \
    megatron-nvme install /context --sha256 "${SHA256}" \
        --version "${VERSION}" --upstream "${UPSTREAM}" --series "${SERIES}" --tree "${TREE}" \
    && megatron-nvme requirements \
    && megatron-nvme doctor \
    && megatron-nvme smoke

# All but INPUT were compared with the wheel above.
ARG BASE_IMAGE
ARG INPUT
LABEL org.opencontainers.image.title="megatron-nvme" \
      org.opencontainers.image.description="Megatron-core with its optimizer state on NVMe" \
      org.opencontainers.image.licenses="BSD-3-Clause AND Apache-2.0 AND MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      megatron-nvme.upstream="${UPSTREAM}" \
      megatron-nvme.series-sha256="${SERIES}" \
      megatron-nvme.tree="${TREE}" \
      megatron-nvme.wheel-sha256="${SHA256}" \
      megatron-nvme.input-sha256="${INPUT}"
