# Container image of every node: the trainer with its packages, and the launcher.
# Layers: base, packages (5 GB, change with the lock file), code.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
# packaging/image.sh adds the version, the revision and its date.
LABEL org.opencontainers.image.title=clusterctl-trainer \
      org.opencontainers.image.description="Detection, classification and segmentation trainer for clusterctl jobs" \
      org.opencontainers.image.licenses=Apache-2.0

# NCCL uses InfiniBand and RoCE only with the verbs libraries. torch.compile and Triton, which paints training images on a
# GPU, need a compiler and Python's headers, which Debian's own Python (/usr/bin/python3) has in another package.
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers \
        librdmacm1 g++ $([ ! -e /usr/bin/python3 ] || echo python3-dev) && \
    rm -rf /var/lib/apt/lists/*

# The two optional secrets (packaging/pip-settings.py) are pip settings for a private package index or certificate.
# They are not stored in the image.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN --mount=type=bind,source=requirements,target=/mnt/requirements \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf \
    --mount=type=secret,id=ca.crt \
    python3 -m venv /opt/venv && \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --disable-pip-version-check --no-input --require-hashes \
        --only-binary :all: --requirement /mnt/requirements/trainer.txt

# The default user. Any other uid works too (packaging/entrypoint.sh), so /runs is writable for all.
RUN useradd --uid 1000 --user-group --create-home trainer && install -d -m 1777 /runs
WORKDIR /runs
COPY --chmod=755 packaging/entrypoint.sh /usr/local/bin/entrypoint
ENTRYPOINT ["entrypoint"]
CMD ["trainer", "--help"]

# The lock file includes setuptools, so this step needs no network.
RUN --mount=type=bind,target=/mnt/project \
    cp -r /mnt/project /tmp/project && \
    pip install --disable-pip-version-check --no-index --no-deps --no-build-isolation --no-cache-dir /tmp/project && \
    rm -rf /tmp/project
USER trainer
