"""The `serve` command: the web page of `captioner.app`, for as long as it is wanted."""

import importlib.util
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from captioner import inference
from captioner.errors import InputError
from captioner.inference import Writer
from captioner.memory import give_freed_memory_back
from captioner.progress import working

__all__ = ["serve"]

log = logging.getLogger(__name__)

HOST = "127.0.0.1"  # of this computer alone
LARGEST_UPLOAD = 30 * 2**20  # bytes of a photo
SESSIONS = 50  # whose last page is remembered: 2 MB each


def serve(models: Sequence[Path], port: int) -> None:
    """Shows the page until it is stopped by Ctrl-C or `kill`, which removes what was uploaded.

    Args:
        models: as for `captioner.load`, to choose from; the shipped one if none is given.
        port: of this computer.

    Raises:
        InputError: Gradio is not installed, the port is taken, or there is no such model.
        KeyboardInterrupt: it was stopped.
    """
    if importlib.util.find_spec("gradio") is None:
        raise InputError('the web page needs Gradio: pip install "gradio>=6.31"')
    _check_port(port)
    with working("Loading the model"):
        writers = {
            name: Writer(inference.load(path))
            for name, path in _by_name(models or [inference.PHOTO]).items()
        }
    give_freed_memory_back()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="captioner-") as folder:
        os.environ.update(
            GRADIO_ANALYTICS_ENABLED="False",
            GRADIO_TEMP_DIR=str(Path(folder).resolve()),
            HF_HUB_OFFLINE="1",
        )
        # When it starts, Gradio calls itself, which is no matter for a proxy.
        os.environ["NO_PROXY"] = ",".join([HOST, *filter(None, [os.environ.get("NO_PROXY")])])
        import gradio as gr
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse

        from captioner.app import STYLE, build

        async def refuse(request: object, error: Exception) -> JSONResponse:
            """FastAPI's own answer quotes the request, and fails where that is no valid Unicode."""
            return JSONResponse({"detail": "not a request that this API knows"}, 422)

        page = build(writers, Path(folder).resolve())
        page.launch(
            server_name=HOST,
            server_port=port,
            max_file_size=LARGEST_UPLOAD,
            state_session_capacity=SESSIONS,
            # Fonts of the reader's own computer: by default they come from Google.
            theme=gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("monospace",)),
            css=STYLE,
            footer_links=["api"],
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            run_history=False,
            enable_monitoring=False,
            app_kwargs={"exception_handlers": {RequestValidationError: refuse}},
        )
        try:
            log.info(f"page: http://{HOST}:{port}  (HTTP API: at its foot; Ctrl-C stops it)")
            threading.Event().wait()
        finally:
            page.close(verbose=False)


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise InputError(f"--port is {port}: it must be from 1 to 65535")
    try:
        with socket.create_server((HOST, port)):
            pass
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(f"port {port}: {reason}; give another one with --port") from error


def _by_name(models: Sequence[str | Path]) -> dict[str, str | Path]:
    """Models by what they are called on the page: a run folder's or a file's name, or the path
    where that would be the same."""
    named: dict[str, str | Path] = {}
    for path in models:
        name = Path(path).resolve().stem
        named[str(path) if name in named else name] = path
    return named
