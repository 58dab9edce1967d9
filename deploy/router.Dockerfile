# The router: no torch, no model code.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmroute
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md warmroute.py ./
COPY shared shared
COPY router router
RUN /opt/warmroute/bin/pip install --quiet --constraint constraints.txt .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/warmroute /opt/warmroute
RUN useradd --system --create-home warmroute
USER warmroute
WORKDIR /home/warmroute
ENV PYTHONUNBUFFERED=1 PATH=/opt/warmroute/bin:$PATH WARMROUTE_HOST=0.0.0.0 WARMROUTE_PORT=8000
EXPOSE 8000
STOPSIGNAL SIGTERM
CMD ["warmroute", "router"]
