# The trainer's container image without its 5 GB of packages, see small-image.sh.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title=clusterctl-testbed-small
RUN head -c 20000000 /dev/urandom >/opt/packages
RUN useradd --uid 1000 --user-group --create-home trainer && install -d -m 1777 /runs
WORKDIR /runs
COPY --chmod=755 packaging/entrypoint.sh /usr/local/bin/entrypoint
ENTRYPOINT ["entrypoint"]
ARG TEXT
RUN --mount=type=bind,target=/mnt/project mkdir /opt/project && cp -r /mnt/project/cluster /mnt/project/trainer /opt/project && \
    printf '%s\n' "$TEXT" >>/opt/project/trainer/__init__.py
USER trainer
