"""The sentence encoder: text to vectors, and to a folder and back."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab import __version__
from embedlab.encoders.grad_cache import cached
from embedlab.encoders.loading import load as load
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.files import corruption, ordinary_mode
from embedlab.pooling import build_pooling

if TYPE_CHECKING:
    from embedlab.backbones import Backbone
    from embedlab.pooling import Pooling

log = logging.getLogger(__name__)

CARD = "embedlab.json"
POOLING_WEIGHTS = "pooling.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMAT = 1
_AUTO_TOKENS = {"cpu": 2048, "cuda": 65536}  # a forward; larger ones fall out of a CPU core's cache
_KEPT_ON_DEVICE = 65536  # vectors, before they are moved to the host together


class SentenceEncoder(nn.Module):
    """Tokenization, backbone and pooling.

    Args:
        backbone: token ids to hidden states.
        pooling: hidden states to a vector.
        tokenization: text to token ids, with template and length limit.
        card: where the encoder comes from; plain values, saved with it.
    """

    chunk: int | None = None
    """Rows that a training pass encodes at once (`embedlab.encoders.grad_cache`); None: all."""

    def __init__(
        self,
        backbone: Backbone,
        pooling: Pooling,
        tokenization: Tokenization,
        card: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.tokenization = tokenization
        self.card: dict[str, Any] = card or {}
        if pooling.needs_all_layers:
            backbone.prepare_all_layers()

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's."""
        return self.tokenization.tokenizer

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.pooling.dim

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.backbone.parameters()).device

    def forward(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        """Token ids and mask, [B, L], to vectors [B, `dim`] in fp32, not normalised.

        With a `capacity` the backbone computes that many tokens instead of B x L (`Backbone.forward`).
        """
        if capacity is not None:
            return self._vectors(input_ids, attention_mask, capacity)
        return cached(self._vectors, input_ids, attention_mask, chunk=self.chunk)

    def _vectors(self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None) -> Tensor:
        position = None
        if self.backbone.reads_one(input_ids.device, capacity is not None):
            position = self.pooling.position(attention_mask, self.tokenization.marks)
        hidden = self.backbone(
            input_ids,
            attention_mask,
            all_layers=self.pooling.needs_all_layers,
            capacity=capacity,
            position=position,
        )
        vectors: Tensor = self.pooling(hidden, attention_mask, self.tokenization.marks)
        return vectors

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

        Returns:
            [n, D], float32.

        Raises:
            TypeError: a sentence that is no string.
            UserError: an unknown dtype or output.
        """
        if output not in ("numpy", "tensor"):
            raise UserError("unknown output", key="output", value=output, fix="numpy or tensor")
        single = isinstance(sentences, str)
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"sentence {i} is a {type(text).__name__}, not a string")
        # Texts of the same tokens are encoded once: repeats, and for an uncased tokenizer what differs in case.
        rows = [tuple(row) for row in self.tokenization.ids(texts)]
        place = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        vectors = self.encode_ids(
            list(place),
            batch_size,
            show_progress_bar=show_progress_bar,
            normalize=normalize,
            device=device,
            dtype=dtype,
            to_host=output == "numpy",
        )
        if len(place) < len(rows):
            vectors = vectors[torch.tensor([place[row] for row in rows], device=vectors.device)]
        vectors = vectors[0] if single else vectors
        return vectors.numpy() if output == "numpy" else vectors

    def encode_ids(
        self,
        rows: Sequence[Sequence[int]],
        batch_size: int | None = None,
        *,
        batch_tokens: int | None = None,
        show_progress_bar: bool = False,
        normalize: bool = False,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        to_host: bool = False,
    ) -> Tensor:
        """Vectors of tokenised rows, in their order: what `encode` calls.

        Args:
            rows: of `Tokenization.ids`.
            batch_size: rows a forward.
            batch_tokens: instead: tokens a forward, padding included.
            to_host: move the vectors to the CPU as they come.
            show_progress_bar, normalize, device, dtype: as in `encode`.

        Returns:
            [n, D], float32, on the device.
        """
        if dtype is not None and dtype not in DTYPES:
            raise UserError("unknown dtype", key="dtype", value=dtype, fix=", ".join(DTYPES))
        with (
            self._encoding(device),
            _precision(self.device.type, dtype),
            _progress(show_progress_bar, len(rows)) as done,
        ):
            here = self.device
            target = torch.device("cpu") if to_host else here
            out = torch.empty(len(rows), self.dim, device=target)
            waiting: list[tuple[Tensor, Tensor]] = []
            for batch in self._batches([len(r) for r in rows], batch_size, batch_tokens):
                tokens = self.tokenization.pad([rows[i] for i in batch], 8 if here.type == "cuda" else 1)
                vectors = self(
                    *(tokens[k].to(here, non_blocking=True) for k in ("input_ids", "attention_mask"))
                )
                vectors = vectors.float()
                if normalize:
                    vectors = nn.functional.normalize(vectors, dim=-1)
                waiting.append((torch.tensor(batch, device=target), vectors))
                if sum(len(v) for _, v in waiting) >= _KEPT_ON_DEVICE:
                    _place(out, waiting)
                done(len(batch))
            _place(out, waiting)
        # An inference tensor could not be used in a training step.
        return out

    def _batches(self, lengths: list[int], size: int | None, tokens: int | None) -> Iterator[list[int]]:
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
    def _encoding(self, device: str | torch.device | None) -> Iterator[None]:
        """Evaluation mode on `device` without gradients, and everything as before afterwards."""
        home = self.device
        training = [m for m in self.modules() if m.training]
        stance: AbstractContextManager[Any] = nullcontext()
        if self.backbone.compiled:
            # The many shapes of scoring would each be compiled.
            stance = torch.compiler.set_stance("force_eager")
        try:
            if device is not None and torch.device(device) != home:
                self.to(device)
            self.eval()
            with torch.no_grad(), stance:
                yield
        finally:
            if self.device != home:
                self.to(home)
            for module in training:
                module.training = True

    # identity

    def facts(self, sentences: Sequence[str] | None = None) -> dict[str, Any]:
        """What has to stand beside a score, and of `sentences` how many are cut."""
        training = self.card.get("training") or {}
        template = self.tokenization.template
        return {
            "pooling": asdict(self.pooling.config),
            "template": asdict(template) if template is not None else None,
            "preparation": self.tokenization.preparation,
            "max_length": self.tokenization.max_length,
            "truncated": sum(self.tokenization.ids_and_cut(sentences)[1]) if sentences is not None else None,
            "dtype": str(next(self.backbone.parameters()).dtype).removeprefix("torch."),
            "attention": self.backbone.attention,
            "checkpoint": self.fingerprint(),
            "seed": training.get("seed"),
            "device": str(self.device),
        }

    def fingerprint(self) -> str:
        """Hex hash of all that decides the vectors: weights, pooling, tokenization. The same after `save`."""
        from embedlab.backbones.adapters import plain_weights

        digest = hashlib.sha256()
        own = ((f"model.{n}", v) for n, v in plain_weights(self.backbone))
        for name, weight in (
            *own,
            *sorted((f"pooling.{n}", v) for n, v in self.pooling.state_dict().items()),
        ):
            value = weight.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
        settings = {"pooling": asdict(self.pooling.config), "tokenization": self.tokenization.fingerprint}
        digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def merged(self) -> SentenceEncoder:
        """The encoder with its adapter added to the weights, for the same vectors; itself, where there is none."""
        if self.backbone.adapter is None:
            return self
        from embedlab.backbones.adapters import merged

        plain = merged(self.backbone).to(self.device)
        return SentenceEncoder(plain, self.pooling, self.tokenization, self.card).eval()

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

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        """The files of `save`, into an existing folder."""
        from safetensors.torch import save_file

        from embedlab.backbones.adapter_files import write_adapter
        from embedlab.backbones.load import write_model

        if merge or self.backbone.adapter is None:
            write_model(self.backbone, folder, DTYPES[dtype] if dtype is not None else None)
        else:
            write_adapter(self.backbone, folder)
        self.tokenizer.save_pretrained(folder)
        state = {k: v.detach().cpu().contiguous() for k, v in self.pooling.state_dict().items()}
        if state:
            save_file(state, folder / POOLING_WEIGHTS)
            ordinary_mode(folder / POOLING_WEIGHTS)
        (folder / CARD).write_text(self.card_text(merge), encoding="utf-8")

    def card_text(self, merge: bool = True) -> str:
        """What `embedlab.json` says; where an adapter is not merged, also what it belongs to."""
        adapter = None if merge else self.backbone.adapter
        card = {
            "format": _FORMAT,
            "embedlab": __version__,
            "pooling": asdict(self.pooling.config),
            "tokenization": self.tokenization.to_dict(),
            "backbone": asdict(self.backbone.info) | {"attention": self.backbone.attention},
            "card": self.card,
            "adapter": adapter.card if adapter is not None else None,
        }
        return json.dumps(card, indent=2, ensure_ascii=False, default=str) + "\n"

    def skeleton(self) -> tuple[dict[str, str], dict[str, str]]:
        """The folder of `save` without its weights (of an adapter, not merged), for a checkpoint that holds
        these by name.

        Returns:
            File name -> text, and file name of weights -> prefix of their names in this module's state.
        """
        from embedlab.backbones.adapters import WEIGHTS

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if self.backbone.adapter is None:
                self.backbone.model.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            texts = {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.is_file()}
        texts[CARD] = self.card_text(merge=False)
        model = "model.safetensors" if self.backbone.adapter is None else WEIGHTS
        weights = {model: "backbone.model."}
        if self.pooling.state_dict():
            weights[POOLING_WEIGHTS] = "pooling."
        return texts, weights

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], attention: str | None = None, dtype: str = "float32"
    ) -> SentenceEncoder:
        """Read what `save` wrote, in evaluation mode.

        Args:
            folder: of an encoder.
            attention: another kernel than it was saved with.
            dtype: of the weights (an adapter's base has its own).

        Raises:
            UserError: no encoder, one of a newer format, or files that are broken or do not fit each other.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from embedlab.backbones import load_backbone
        from embedlab.backbones.adapter_files import read_adapter
        from embedlab.config.backbone import BackboneConfig
        from embedlab.encoders.twin import TwinEncoder, twin_card

        folder = Path(folder)
        if twin_card(folder) is not None:
            return TwinEncoder.load(folder, attention, dtype)
        card = read_card(folder)
        kernel = attention or _available(card["backbone"].get("attention", "sdpa"))
        if card["adapter"] is not None:
            backbone, tokenizer = read_adapter(card["adapter"], folder, kernel)
        else:
            config = BackboneConfig("local", folder.name, str(folder), attention=kernel, dtype=dtype)
            backbone, tokenizer = load_backbone(config)
        pooling = build_pooling(card["pooling"], backbone.info)
        weights = folder / POOLING_WEIGHTS
        try:
            pooling.load_state_dict(load_file(weights) if weights.is_file() else {})
        except (SafetensorError, RuntimeError, OSError) as error:
            raise UserError(
                f"the pooling's weights do not fit: {corruption(error) or error}",
                file=weights,
                fix="another copy of the encoder",
            ) from error
        tokenization = Tokenization.from_dict(tokenizer, card["tokenization"])
        return cls(backbone, pooling, tokenization, card["card"]).eval()

    def to_sentence_transformers(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder for `sentence_transformers.SentenceTransformer`, which gives the same vectors.

        Templates and marks need code of this package: `embedlab.export.sentence_transformers` says when.

        Raises:
            UserError: as `save`.
        """
        from embedlab.export.sentence_transformers import write_sentence_transformers

        with whole_folder(folder) as fresh:
            write_sentence_transformers(self, fresh)


def read_card(folder: Path) -> dict[str, Any]:
    """`embedlab.json` of an encoder folder.

    Raises:
        UserError: there is none, it is broken, or it is of a newer format.
    """
    file = folder / CARD
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        if card["format"] > _FORMAT:
            raise UserError(
                f"was written by embedlab {card.get('embedlab')}, and this one is too old to read it",
                file=file,
                fix="pip install -U embedlab",
            )
        wanted = {key: card[key] for key in ("pooling", "tokenization", "backbone", "card")}
        return wanted | {"adapter": card.get("adapter")}
    except OSError as error:
        raise UserError(
            f"is no encoder: {error.strerror}", file=file, fix="a folder that save wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"is broken ({error!r})", file=file, fix="another copy of the encoder") from error


@contextmanager
def whole_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well, and is gone otherwise.

    Raises:
        UserError: `folder` is a file, or a folder with other things than an encoder in it.
    """
    target = Path(os.path.abspath(os.path.expanduser(folder)))
    if target.exists() and not target.is_dir():
        raise UserError("is a file", file=target, fix="the name of a folder")
    marks = (CARD, "modules.json", "config.json")
    if target.is_dir() and any(target.iterdir()) and not any((target / m).is_file() for m in marks):
        raise UserError("holds other things than an encoder", file=target, fix="another folder, or empty it")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    fresh.mkdir()
    try:
        yield fresh
        if target.exists():
            old = fresh.with_name(fresh.name + ".old")
            os.rename(target, old)
            os.rename(fresh, target)
            shutil.rmtree(old)
        else:
            os.rename(fresh, target)
    finally:
        if fresh.exists():
            shutil.rmtree(fresh)


def _available(attention: str) -> str:
    if attention == "flash_attention_2":
        from transformers.utils.import_utils import is_flash_attn_2_available

        if not (torch.cuda.is_available() and is_flash_attn_2_available()):
            log.warning("flash_attention_2 is not available here: using sdpa.")
            return "sdpa"
    return attention


def _precision(device_type: str, dtype: str | None) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[dtype], enabled=dtype != "float32")


def _place(out: Tensor, waiting: list[tuple[Tensor, Tensor]]) -> None:
    """Put finished vectors into their rows."""
    for index, vectors in waiting:
        out[index] = vectors.to(out.device)
    waiting.clear()


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Any]:
    """A function that advances a bar by a number of sentences."""
    if not show:
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("encoding", total=total)
        yield lambda n: bar.advance(task, n)
