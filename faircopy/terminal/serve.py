"""`faircopy serve`: options from the command line, the environment and a file, then the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faircopy.errors import ConfigError
from faircopy.kernels.memory import keep_all_objects
from faircopy.llm import LLM


def read_options(file: str, known: set[str]) -> dict[str, Any]:
    """The options in a file of --config; unknown ones are refused."""
    from faircopy.config import refuse_unknown

    require_packages()
    from faircopy.server.settings import read_config

    values = read_config(Path(file))
    refuse_unknown("config", values, known)
    if isinstance(values.get("cors"), str):
        values["cors"] = values["cors"].split()  # one origin or several, as in the environment
    return values


def serve(llm: LLM, log_format: str, log_level: str, api_keys: Path | None, **options: Any) -> None:
    """Serve until a signal comes."""
    require_packages()
    from faircopy.server import logs
    from faircopy.server.run import make_server
    from faircopy.server.settings import ServerConfig, read_keys

    _refuse_other("log_format", log_format, logs.FORMATS)
    _refuse_other("log_level", log_level.lower(), logs.LEVELS)
    config = ServerConfig(api_keys=read_keys(api_keys), **options)
    check_port(config.host, config.port)
    logs.set_up(log_format, log_level)
    llm.warm_up()
    keep_all_objects()
    server = make_server(llm, config)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # uvicorn raises it again at the end: a traceback of every open stream
    server.run()


def serve_replicas(
    make: Callable[[], LLM], api_keys: Path | None, fleet: dict[str, Any], most_requests: int, **options: Any
) -> None:
    """Serve with several engines on Ray Serve until a signal comes. make: loads the engine of a replica."""
    require_packages()
    require_ray()
    from faircopy.ray.deployment import Fleet, run
    from faircopy.server.settings import ServerConfig, read_keys

    config = ServerConfig(api_keys=read_keys(api_keys), **options)
    check_port(config.host, config.port)
    run(make, config, Fleet(**fleet), most_requests)


def _refuse_other(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(field, value, "unknown", f"use one of {', '.join(known)}")


def require_packages(command: str = "serve") -> None:
    """Refuse a command whose packages are not installed."""
    try:
        import fastapi  # noqa: F401
        import llguidance  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(command, error.name, "not installed", "pip install 'faircopy[serve]'") from error


def require_ray() -> None:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError("ray", error.name, "not installed", "pip install 'faircopy[ray]'") from error


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be had before the server says that it starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError("port", f"{host}:{port}", f"cannot be used ({error})", "choose another") from error
