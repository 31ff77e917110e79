# docker build . -t megablocks-dev, then bash docker.sh. The base is the image that the pinned Megatron-LM is built on;
# its apex and Transformer Engine are used where present and never required: any image with torch >= 2.8 and
# Python >= 3.12 will do (--build-arg BASE=…).
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

COPY third_party/pins.txt third_party/fetch.sh /opt/megablocks/third_party/
RUN /opt/megablocks/third_party/fetch.sh Megatron-LM Tutel \
    && pip install --no-cache-dir --no-build-isolation --no-deps /opt/megablocks/third_party/Tutel

COPY pyproject.toml setup.py README.md LICENSE /opt/megablocks/
COPY megablocks /opt/megablocks/megablocks
RUN pip install --no-cache-dir "/opt/megablocks[megatron]"

# A checkout mounted by docker.sh comes before the installed package.
WORKDIR /mount/megablocks
