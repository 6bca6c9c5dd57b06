# docker build -t shardwise . && docker run --rm shardwise
FROM python:3.12-slim

# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /shardwise
COPY . .
RUN make setup
CMD ["make", "demo"]
