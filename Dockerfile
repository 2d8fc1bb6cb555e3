# An image of agentenv; docs/deploy.md has the arguments.
ARG BASE=python:3.12-slim

FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG EXTRA=train
# another index of packages for pip, such as that of PyTorch for CPUs
ARG PIP_EXTRA_INDEX_URL
# bubblewrap: the sandbox of Python and of programs
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "agentenv-rl[${EXTRA}] @ file://$(ls /wheels/*.whl)"
RUN useradd --create-home --uid 1000 agentenv
USER 1000
WORKDIR /home/agentenv
ENTRYPOINT ["agentenv"]
CMD ["--help"]
