"""The two small models that come with the package; `examples/demo_model` says how they were made and what they can."""

from __future__ import annotations

from pathlib import Path

from teola_plugin.errors import EngineUnavailable

FOLDER = Path(__file__).parent / "models"


def llm_folder() -> Path:
    """Return the folder of a Llama of 4 million parameters for RAG pipelines. Raise EngineUnavailable."""
    return _model_folder("demo-llm")


def reranker_folder() -> Path:
    """Return the folder of a cross-encoder of 0.9 million parameters. Raise EngineUnavailable."""
    return _model_folder("demo-reranker")


def _model_folder(name: str) -> Path:
    """Return the folder of a model that comes with the package. Raise `EngineUnavailable` if it is missing."""
    folder = FOLDER / name
    if not (folder / "model.safetensors").is_file():
        raise EngineUnavailable(
            f"the bundled model {name!r} is not in {folder}.",
            engine=name,
            hint="install teola-plugin again, or name a model of your own; `make model` trains these anew",
        )
    return folder
