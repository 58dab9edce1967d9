# An engine replica: torch and transformers. A CPU wheel of torch in deploy/wheels keeps the image small.
FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/warmroute
WORKDIR /src
# The heavy dependencies first: a change of our code does not fetch torch again.
COPY constraints.txt ./
COPY deploy/wheels /wheels
RUN /opt/warmroute/bin/pip install --quiet --find-links /wheels --constraint constraints.txt torch transformers
COPY pyproject.toml LICENSE README.md warmroute.py ./
COPY shared shared
COPY replica replica
RUN /opt/warmroute/bin/pip install --quiet --find-links /wheels --constraint constraints.txt '.[engine]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/warmroute /opt/warmroute
RUN useradd --system --create-home warmroute
USER warmroute
WORKDIR /home/warmroute
ENV PYTHONUNBUFFERED=1 PATH=/opt/warmroute/bin:$PATH WARMROUTE_HOST=0.0.0.0 WARMROUTE_PORT=8100
EXPOSE 8100
STOPSIGNAL SIGTERM
CMD ["warmroute", "replica"]
