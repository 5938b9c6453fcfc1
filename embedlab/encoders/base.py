"""What every encoder shares, whatever its vectors are made of: encoding texts, and saving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from embedlab.console import progress_bar
from embedlab.encoders.folder import EncoderFile, whole_folder
from embedlab.encoders.pipeline import DistinctRows, Encoding, Reader, Window, padded_batches
from embedlab.encoders.sharing import Users, shared
from embedlab.encoders.token_rows import Row, TokenRows
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError, one_of

if TYPE_CHECKING:
    from embedlab.encoders.tokenization import Tokenization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_NO_VECTORS = frozenset(
    {
        "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id",
        "problem_type", "initializer_range", "output_attentions", "output_hidden_states", "return_dict", "use_cache",
    }
)  # fmt: skip
"""Of a model's configuration: what changes where a folder is copied, trained on, or written by another release."""


class Encoder(nn.Module):
    """Text to vectors.

    Args:
        card: where the encoder comes from; plain values, saved with it.
        usage: prompts, kept width and similarity.
    """

    tokenization: Tokenization
    towers: Sequence[Any]
    """The encoders of one backbone each that it is made of; of one such encoder, itself."""
    mixed = False
    """Whether its towers read text differently, so that it has texts to encode but no token ids."""
    tokens_read = 0
    """Tokens that have been encoded so far, repeats once, for whoever shows how fast that is."""
    chunk: int | None = None
    """Rows that a training pass encodes at once (`embedlab.encoders.grad_cache`); None: all."""

    def __init__(self, card: dict[str, Any] | None = None, usage: Usage | None = None) -> None:
        super().__init__()
        self.card: dict[str, Any] = card or {}
        self.usage = usage or Usage()
        self._users = Users()

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's."""
        return self.tokenization.tokenizer

    @property
    def prompts(self) -> dict[str, str]:
        """Texts that go before a sentence, by name: `encode(prompt_name=NAME)`."""
        return self.usage.prompts

    @property
    def default_prompt(self) -> str | None:
        """Name of the prompt that `encode` uses where none is named."""
        return self.usage.default_prompt

    @property
    def dim(self) -> int:
        """Width of the vectors that `encode` gives."""
        width = int(self.towers[0].pooling.dim)
        return min(width, self.usage.truncate_dim or width)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def kept_width(self, dim: int | None) -> int:
        """Features of a vector that is cut to `dim` (None: not); UserError where it has fewer."""
        if dim is None:
            return self.dim
        if type(dim) is not int or not 1 <= dim <= self.dim:
            told = f"exceeds width {self.dim}" if type(dim) is int and dim > self.dim else "not a width"
            raise UserError(told, key="dim", value=dim, fix=f"a whole number from 1 to {self.dim}")
        return dim

    def fingerprint(self) -> str:
        """Hex hashes of all that decides the vectors: of weights, pooling and reading, and behind a plus sign of what
        the models' configurations say besides (activation, heads, rotary base, window, direction). The same after
        `save`; to be compared by `same_encoder`."""
        told = [_told(tower.backbone.model.config) for tower in self.towers]
        second = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self._digest()}+{second[:16]}"

    def _digest(self) -> str:
        """The fingerprint's first hash, which stays what it was in the first indexes and cards."""
        raise NotImplementedError

    def merged(self) -> Encoder:
        """The encoder with its adapter added to the weights, for the same vectors; itself, where there is none."""
        return self

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        """The files of `save`, into an existing folder."""
        raise NotImplementedError

    def manifest(self) -> dict[str, dict[str, str]]:
        """The folder of `save` without its weights (of an adapter, not merged), for a checkpoint that holds
        these by name.

        Returns:
            ``files``: file name -> text; ``weights``: file name -> prefix of their names in this module's state.
        """
        raise NotImplementedError

    def description(self, **more: Any) -> EncoderFile:
        """What `embedlab.json` says, with what a kind of encoders has besides."""
        first = self.towers[0]
        return EncoderFile(
            pooling=asdict(first.pooling.config),
            tokenization=self.tokenization.to_dict(),
            backbone=asdict(first.backbone.info)
            | {"attention": first.backbone.attention}
            | ({"commit": first.backbone.commit} if first.backbone.commit else {}),
            card=self.card,
            usage=self.usage.to_dict(),
            **more,
        )

    def provenance(self, sentences: Sequence[str] | None = None) -> dict[str, Any]:
        """What has to stand beside a score, and of `sentences` how many are cut."""
        tower = self.towers[0]
        training = self.card.get("training") or {}
        template = self.tokenization.template
        return {
            "pooling": asdict(tower.pooling.config),
            "template": asdict(template) if template is not None else None,
            "preparation": self.tokenization.preparation,
            "max_length": self.tokenization.max_length,
            "truncated": None if sentences is None else self.tokenization.count_cut(sentences),
            "dtype": str(next(tower.backbone.parameters()).dtype).removeprefix("torch."),
            "attention": tower.backbone.attention,
            "checkpoint": self.fingerprint(),
            "seed": training.get("seed"),
            "device": str(self.device),
        } | {
            key: value
            for key, value in (
                ("hub", self.card.get("hub")),
                ("backbone_commit", tower.backbone.commit),
                ("usage", self.usage.to_dict()),
            )
            if value
        }

    # encoding

    def encode(
        self,
        sentences: str | Sequence[str],
        batch_size: int | None = None,
        show_progress_bar: bool = False,
        normalize: bool = False,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        output: str = "numpy",
        on_batch: Callable[[int, int], None] | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dim: int | None = None,
    ) -> Any:
        """Vectors of sentences, in their order, whatever their lengths and the batches.

        Dropout is off meanwhile, and every module is in its former mode afterwards.

        Args:
            sentences: any of them empty; one string gives one vector, [D].
            batch_size: sentences a forward; None: as many as keep the device busy.
            show_progress_bar: on stderr.
            normalize: to length 1, in fp32. (A zero vector stays zero.)
            device: to encode on; the encoder goes back afterwards.
            dtype: ``float32``, ``bfloat16`` or ``float16`` for the backbone (autocast); pooling is in fp32
                always. None: as the surroundings say.
            output: ``numpy``, or ``tensor`` (on the device).
            on_batch: called after each forward with the number of sentences done, and of all.
            prompt: a text that goes before each sentence.
            prompt_name: instead: the name of one of the encoder's own (``encoder.usage.prompts``). None of both:
                its default one, if it has one.
            dim: the first features that are kept, of an encoder that was trained for it (Matryoshka); `normalize`
                comes after the cut. None: as `usage` says.

        Returns:
            [n, D], float32.

        Raises:
            TypeError: a sentence that is no string.
            UserError: an unknown dtype, output or prompt; a `dim` beyond the width; or a sentence that cannot be
                written as UTF-8.
        """
        if output not in ("numpy", "tensor"):
            raise UserError("unknown output", key="output", value=output, fix="numpy or tensor")
        before = self.usage.text(prompt, prompt_name)
        vectors = self.encode_texts(
            [before + text for text in _texts(sentences)],
            normalize=normalize,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            device=device,
            dtype=dtype,
            to_host=output == "numpy",
            on_batch=on_batch,
            skip=0 if self.usage.include_prompt else self.tokenization.tokens_before(before),
            dim=None if dim is None else self.kept_width(dim),
        )
        vectors = vectors[0] if isinstance(sentences, str) else vectors
        return vectors.numpy() if output == "numpy" else vectors

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> Tensor:
        """Vectors of texts, [n, D]: what `encode` calls, with the settings of `encode_ids`."""
        there = self.device if device is None else torch.device(device)
        rows = DistinctRows(self.tokenization, texts, there)
        with closing(iter(rows)) as windows:
            return rows.spread(self._encode(windows, len(texts), device=device, **settings))

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt for queries: the one named ``query``, else the default one."""
        return self.encode(sentences, prompt=self.usage.role("query"), **options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt for documents: ``document``, ``passage`` or ``corpus``, else the default one."""
        return self.encode(sentences, prompt=self.usage.role("document"), **options)

    def encode_ids(
        self,
        rows: Sequence[Row],
        batch_size: int | None = None,
        *,
        batch_tokens: int | None = None,
        show_progress_bar: bool = False,
        normalize: bool = False,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        to_host: bool = False,
        on_batch: Callable[[int, int], None] | None = None,
        skip: int = 0,
        dim: int | None = None,
    ) -> Tensor:
        """Vectors of tokenised rows, in their order.

        Args:
            rows: of `Tokenization.ids`.
            batch_size: rows a forward.
            batch_tokens: instead: tokens a forward, padding included.
            to_host: move the vectors to the CPU as they come.
            skip: tokens at the start of each row that the pooling leaves out.
            show_progress_bar, normalize, device, dtype, on_batch, dim: as in `encode`.

        Returns:
            [n, D], float32, on the device, or with `to_host` on the CPU.
        """
        window = Window(TokenRows.of(rows), np.arange(len(rows)), len(rows))
        return self._encode(
            [window], len(rows), batch_size=batch_size, batch_tokens=batch_tokens,
            show_progress_bar=show_progress_bar, normalize=normalize, device=device, dtype=dtype,
            to_host=to_host, on_batch=on_batch, skip=skip, dim=dim,
        )  # fmt: skip

    def _encode(
        self,
        windows: Iterable[Window],
        texts: int,
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        show_progress_bar: bool = False,
        normalize: bool = False,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        to_host: bool = False,
        on_batch: Callable[[int, int], None] | None = None,
        skip: int = 0,
        dim: int | None = None,
    ) -> Tensor:
        """Vectors of windows of rows, [`texts`, D], each in its place; settings as of `encode_ids`."""
        if dtype is not None and dtype not in DTYPES:
            raise UserError("unknown dtype", key="dtype", value=dtype, fix=one_of(dtype, DTYPES))
        width = self.kept_width(dim)
        with (
            self.evaluating(device),
            _precision(self.device.type, dtype),
            progress_bar("encoding", "texts", texts, show_progress_bar) as move,
        ):
            # An inference tensor could not be used in a training step.
            out = torch.empty(texts, width, device="cpu" if to_host else self.device)
            run = Encoding(self, out, batch_size, batch_tokens, normalize, skip)
            read = self.tokens_read
            for done in run(windows, texts):
                self.tokens_read = read + run.tokens_read
                move(done, done)
                if on_batch is not None:
                    on_batch(done, texts)
        return out

    def reader(self, skip: int) -> Reader | None:
        """How rows are read without padding, by the weights as they are now; None: they have to be padded.

        Args:
            skip: tokens at the start of each row that the pooling leaves out.
        """
        return None

    def batches(self, lengths: list[int], size: int | None, tokens: int | None) -> Iterator[list[int]]:
        """`padded_batches` for the encoder's device."""
        for batch in padded_batches(lengths, size, tokens, self.device):
            yield batch.tolist()

    @contextmanager
    def evaluating(self, device: str | torch.device | None) -> Iterator[None]:
        """Evaluation mode on `device` (None: where the encoder is at home) without gradients, and everything as before
        afterwards.

        Threads may be here together: mode and device are as before once the last of them leaves. One that wants
        another device than the others waits for them.
        """
        stance: AbstractContextManager[Any] = nullcontext()
        if any(tower.backbone.compiled for tower in self.towers):
            # The many shapes of scoring would each be compiled.
            stance = torch.compiler.set_stance("force_eager")
        wanted = None if device is None else torch.empty(0, device=device).device
        with shared(self, wanted), torch.no_grad(), stance:
            yield

    # folders

    def save(self, folder: str | os.PathLike[str], dtype: str | None = None, merge: bool = True) -> None:
        """Write the encoder to a folder, whole or not at all; an encoder that is there is replaced.

        The folder is a Hugging Face one (with the language-modelling head, where the backbone has one) beside
        `embedlab.json` and, for a pooling with weights, `pooling.safetensors`.

        Args:
            folder: gets the files.
            dtype: store the weights in another one than they have (loading gives fp32 again).
            merge: add an adapter to the weights that it belongs to; False: store it by itself, as PEFT does,
                and where its base is.

        Raises:
            UserError: `folder` is a file, or holds something else than an encoder.
        """
        with whole_folder(folder) as fresh:
            self.write(fresh, dtype, merge)

    def to_sentence_transformers(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder for `sentence_transformers.SentenceTransformer`, which gives the same vectors.

        Templates and marks need code of this package: `embedlab.encoders.sentence_transformers` says when.

        Raises:
            UserError: as `save`.
        """
        raise NotImplementedError


def _told(config: Any) -> dict[str, Any]:
    """What a model's configuration says that its class does not say by itself: a newer one's further keys are no
    change."""
    try:
        usual = type(config)().to_dict()
    except Exception:  # of a class that comes with a checkpoint anything may be raised
        usual = {}
    return {"model_type": config.model_type} | _unlike(config.to_dict(), usual)


def _unlike(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The values that decide vectors and differ, in configurations within this one too."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        its = usual.get(key)
        if key in _NO_VECTORS or "drop" in key or value == its:
            continue
        found[key] = _unlike(value, its) if isinstance(value, dict) and isinstance(its, dict) else value
    return found


def _texts(sentences: str | Sequence[str]) -> list[str]:
    """The sentences, each one a text."""
    texts = [sentences] if isinstance(sentences, str) else list(sentences)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"sentence {i} is a {type(text).__name__}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            fix = "text.encode('utf-8', 'replace').decode()"
            raise UserError(
                f"sentence {i} holds half of a character ({text[at]!r} at {at})", fix=fix
            ) from None
    return texts


def _precision(device_type: str, dtype: str | None) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[dtype], enabled=dtype != "float32")
