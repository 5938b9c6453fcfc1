"""Where an attempt of `tools/attacks.py` works: beside a model, an encoder, an index and a run that are whole."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import torch

from embedlab.cli.main import main as embedlab

TEXTS = (
    "a cat on the mat",
    "the dog runs",
    "rain falls on the river",
    "birds sing in a tree",
    "she reads a book",
)
MARK = "ran"


class Bomb:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@dataclass
class Place:
    """Where an attempt works, beside what is whole, and the mark that planted code would leave."""

    folder: Path

    @property
    def mark(self) -> Path:
        return self.folder / MARK

    def run(self, *arguments: str | Path, status: int | None = None) -> str:
        """A command's output; its exit status has to be 0 or 2, or `status`."""
        said = io.StringIO()
        root = logging.getLogger()
        handler = logging.StreamHandler(said)
        root.addHandler(handler)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = embedlab([str(a) for a in arguments])
        finally:
            root.removeHandler(handler)
        assert found in ((0, 2) if status is None else (status,)), f"status {found}: {said.getvalue()[-300:]}"
        return said.getvalue()

    def plant(self, folder: Path, **config: Any) -> None:
        """Code in a model's folder, which its configuration and its tokenizer name."""
        name = f"theirs_{secrets.token_hex(4)}"  # a module that has been imported once would leave no second mark
        (folder / f"{name}.py").write_text(f"import os\nos.mkdir({str(self.mark)!r})\n")
        auto = {"AutoConfig": f"{name}.Own", "AutoModel": f"{name}.Own", "AutoTokenizer": [f"{name}.Own"] * 2}
        for name in ("config.json", "tokenizer_config.json"):
            change(folder / name, {"auto_map": auto} | config)

    def hostile(self) -> Path:
        """A model that only code of its own can load."""
        folder = Path(shutil.copytree(self.folder / "model", self.folder / "hostile"))
        self.plant(folder, model_type="their_own")
        return folder

    def adapter(self) -> Path:
        """An encoder that names the hostile model as the base of its adapter, and says that it may be trusted."""
        folder = Path(shutil.copytree(self.folder / "encoder", self.folder / "adapter"))
        base = {"source": "local", "name": "x", "path": str(self.hostile()), "trust_remote_code": True}
        card = {"config": {"name": "lora", "r": 2, "targets": []}, "base": base, "digest": "x"}
        change(folder / "embedlab.json", {"adapter": card})
        return folder

    def train(self, *more: str) -> list[str]:
        return [
            "train", "backbone=local", f"backbone.path={self.folder / 'model'}", "trainer=cpu", "data.batch_size=2",
            f"data.files={self.folder / 'texts.txt'}", f"data.cache_dir={self.folder / 'cache'}", "data.min_chars=1",
            "callbacks.progress=none", "evaluation.final=[]", "evaluation.before=false", "trainer.max_steps=1",
            f"hydra.run.dir={self.folder / 'run'}", *more,
        ]  # fmt: skip


def change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def whole(folder: Path) -> None:
    """A model, an encoder, an index and a run, as this package writes them."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    import embedlab as package
    from embedlab.files import assets_dir

    tokenizer = AutoTokenizer.from_pretrained(assets_dir() / "mini", trust_remote_code=False)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"hidden_size": 32, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    package.load(folder / "model").save(folder / "encoder")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    place = Place(folder)
    place.run(
        "search", "index", folder / "texts.txt", folder / "index", f"ckpt={folder / 'encoder'}", status=0
    )
    place.run(*place.train(), status=0)
