"""What every encoder shares, whatever its vectors are made of: encoding texts, and saving."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from threading import Condition, get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedlab.console import progress_bar
from embedlab.encoders.folder import EncoderFile, whole_folder
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.encoders.tokenization import Tokenization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_TOKENS = {"cpu": 2048, "cuda": 65536}  # a forward; larger ones fall out of a CPU core's cache
_KEPT_ON_DEVICE = 65536  # vectors, before they are moved to the host together


_USE = Condition()
"""Guards mode and device of encoders that threads share; of none's own, which could not be copied."""


class Encoder(nn.Module):
    """Text to vectors.

    Args:
        card: where the encoder comes from; plain values, saved with it.
        usage: prompts, kept width and similarity.
    """

    towers: Sequence[Any]
    """The encoders of one backbone each that it is made of; of one such encoder, itself."""
    tokenization: Tokenization
    mixed = False
    """Whether its towers read text differently, so that it has texts to encode but no token ids."""
    chunk: int | None = None
    """Rows that a training pass encodes at once (`embedlab.encoders.grad_cache`); None: all."""

    def __init__(self, card: dict[str, Any] | None = None, usage: Usage | None = None) -> None:
        super().__init__()
        self.card: dict[str, Any] = card or {}
        self.usage = usage or Usage()
        self._users: list[int] = []  # threads, one that is nested more than once
        self._home = torch.device("cpu")
        self._trained: list[nn.Module] = []

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's."""
        return self.tokenization.tokenizer

    @property
    def dim(self) -> int:
        """Width of the vectors that `encode` gives."""
        width = int(self.towers[0].pooling.dim)
        return min(width, self.usage.truncate_dim or width)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def fingerprint(self) -> str:
        """Hex hash of all that decides the vectors. The same after `save`."""
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

        Returns:
            [n, D], float32.

        Raises:
            TypeError: a sentence that is no string.
            UserError: an unknown dtype, output or prompt; or a sentence that cannot be written as UTF-8.
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
        )
        vectors = vectors[0] if isinstance(sentences, str) else vectors
        return vectors.numpy() if output == "numpy" else vectors

    def encode_texts(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = False,
        on_batch: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> Tensor:
        """Vectors of texts, [n, D]: what `encode` calls, with the settings of `encode_ids`."""
        rows, places = self._distinct_rows(texts)
        told = on_batch and (lambda done, of: on_batch(len(places) * done // of, len(places)))
        vectors = self.encode_ids(rows, normalize=normalize, on_batch=told, **settings)
        return vectors[torch.tensor(places, device=vectors.device)] if len(rows) < len(places) else vectors

    def _distinct_rows(self, texts: Sequence[str]) -> tuple[list[NDArray[np.int32]], list[int]]:
        """Rows of ids, and the place of each text's among them.

        Texts of the same tokens are encoded once: repeats, and for an uncased tokenizer what differs in case.
        """
        index: dict[bytes, int] = {}  # as int32: a Python list of numbers takes nine times as much
        places = [
            index.setdefault(array("i", row).tobytes(), len(index))
            for rows, _ in self.tokenization.tokenised(texts)
            for row in rows
        ]
        return [np.frombuffer(row, np.int32) for row in index], places

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt for queries: the one named ``query``, else the default one."""
        return self.encode(sentences, prompt=self.usage.role("query"), **options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt for documents: ``document``, ``passage`` or ``corpus``, else the default one."""
        return self.encode(sentences, prompt=self.usage.role("document"), **options)

    def encode_ids(
        self,
        rows: Sequence[Sequence[int] | NDArray[np.int32]],
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
    ) -> Tensor:
        """Vectors of tokenised rows, in their order: what `encode` calls.

        Args:
            rows: of `Tokenization.ids`.
            batch_size: rows a forward.
            batch_tokens: instead: tokens a forward, padding included.
            to_host: move the vectors to the CPU as they come.
            skip: tokens at the start of each row that the pooling leaves out.
            show_progress_bar, normalize, device, dtype, on_batch: as in `encode`.

        Returns:
            [n, D], float32, on the device.
        """
        if dtype is not None and dtype not in DTYPES:
            raise UserError("unknown dtype", key="dtype", value=dtype, fix=", ".join(DTYPES))
        with (
            self.evaluating(device),
            _precision(self.device.type, dtype),
            progress_bar("encoding", "texts", len(rows), show_progress_bar) as move,
        ):
            here = self.device
            target = torch.device("cpu") if to_host else here
            out = torch.empty(len(rows), self.dim, device=target)
            waiting: list[tuple[Tensor, Tensor]] = []
            done = 0
            for batch in self.batches([len(r) for r in rows], batch_size, batch_tokens):
                tokens = self.tokenization.pad([rows[i] for i in batch], 8 if here.type == "cuda" else 1)
                inputs = [tokens[k].to(here, non_blocking=True) for k in ("input_ids", "attention_mask")]
                vectors = self(*inputs, **({"skip": skip} if skip else {})).float()[:, : self.dim]
                if normalize:
                    vectors = nn.functional.normalize(vectors, dim=-1)
                waiting.append((torch.tensor(batch, device=target), vectors))
                # Small vectors that are kept between large activations would break the host's memory into pieces.
                if target == here or sum(len(v) for _, v in waiting) >= _KEPT_ON_DEVICE:
                    _fill(out, waiting)
                done += len(batch)
                move(done, done)
                if on_batch is not None:
                    on_batch(done, len(rows))
            _fill(out, waiting)
        # An inference tensor could not be used in a training step.
        return out

    def batches(self, lengths: list[int], size: int | None, tokens: int | None) -> Iterator[list[int]]:
        """Row numbers of similar lengths, longest first: what does not fit into memory fails at once."""
        if size is not None and size < 1:
            raise UserError("not a whole number from 1 up", key="batch_size", value=size)
        if size is None and tokens is None:
            tokens = _AUTO_TOKENS.get(self.device.type, _AUTO_TOKENS["cpu"])
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        at = 0
        while at < len(order):
            longest = max(1, lengths[order[at]])
            n = size if size is not None else max(1, (tokens or 0) // longest)
            yield order[at : at + n]
            at += n

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
        with _USE:
            before = self._enter(None if device is None else torch.empty(0, device=device).device)
        try:
            with torch.no_grad(), stance:
                yield
        finally:
            with _USE:
                self._leave(before)

    def _enter(self, device: torch.device | None) -> torch.device:
        """A thread begins to use the encoder; returns where the encoder was."""
        me = get_ident()
        inside = me in self._users  # already: None is then where that use is

        def wanted() -> torch.device:
            return device or (self.device if inside or not self._users else self._home)

        while set(self._users) - {me} and wanted() != self.device:
            _USE.wait()
        before = self.device
        if not self._users:
            self._home = before
            self._trained = [m for m in self.modules() if m.training]
            self.eval()
        self._users.append(me)
        try:
            if wanted() != before:
                self.to(wanted())
        except BaseException:
            self._leave(before)
            raise
        return before

    def _leave(self, before: torch.device) -> None:
        me = get_ident()
        self._users.remove(me)
        home = before if me in self._users else self._home
        if not set(self._users) - {me} and self.device != home:
            self.to(home)
        if not self._users:
            for module in self._trained:
                module.training = True
            self._trained = []
        _USE.notify_all()

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


def _fill(out: Tensor, waiting: list[tuple[Tensor, Tensor]]) -> None:
    """Put finished vectors into their rows."""
    for index, vectors in waiting:
        out[index] = vectors.to(out.device)
    waiting.clear()
