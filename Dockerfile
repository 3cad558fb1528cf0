# The image that every node runs: the trainer with all it needs, and the launcher's few packages.
# Layers from slow and rarely changed to quick and often changed: base, packages (5 GB, the lock file only), our code.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title=clusterctl-trainer \
      org.opencontainers.image.licenses=Apache-2.0

# The two secrets are optional (packaging/pip-settings.py): a machine with its own package index or certificates gives
# them to `pip` here, and nothing of them is kept in the image.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN --mount=type=bind,source=requirements,target=/mnt/requirements \
    --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf \
    --mount=type=secret,id=ca.crt \
    python3 -m venv /opt/venv && \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --disable-pip-version-check --no-input --require-hashes \
        --only-binary :all: --requirement /mnt/requirements/trainer.txt

# A user for whoever names none. Any other uid works too (packaging/entrypoint.sh), so /runs is open to all.
RUN useradd --uid 1000 --user-group --create-home trainer && install -d -m 1777 /runs
WORKDIR /runs
COPY --chmod=755 packaging/entrypoint.sh /usr/local/bin/entrypoint
ENTRYPOINT ["entrypoint"]
CMD ["trainer", "--help"]

# Our code last. setuptools comes with the lock, so this step needs no network.
RUN --mount=type=bind,target=/mnt/project \
    cp -r /mnt/project /tmp/project && \
    pip install --disable-pip-version-check --no-index --no-deps --no-build-isolation --no-cache-dir /tmp/project && \
    rm -rf /tmp/project
USER trainer
