"""SimCSE in plain Python: no Hydra, no Lightning, the project's objective and encoder in a loop of one's own.

python examples/plain_method.py SENTENCES.txt OUT [STEPS]
"""

import random
import sys
from pathlib import Path

import torch

import embedlab
from embedlab.objectives.info_nce import info_nce


def train(sentences: list[str], steps: int = 40, batch: int = 64, lr: float = 3e-5, seed: int = 0):
    """The shipped encoder after some steps, each of a random batch, and the losses."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    encoder = embedlab.load(
        "mini"
    ).train()  # it comes in evaluation mode: without dropout both views would be equal
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        texts = draw.sample(sentences, min(batch, len(sentences)))
        rows = encoder.tokenization.pad(encoder.tokenization.ids([*texts, *texts]))  # both views in one pass
        first, second = encoder(rows["input_ids"], rows["attention_mask"]).chunk(2)
        result = info_nce(first, second, tau=0.05)
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.step()
        losses.append(float(result.loss))
    return encoder.eval(), losses


if __name__ == "__main__":
    file, out, *steps = sys.argv[1:]
    lines = sorted({line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()} - {""})
    trained, losses = train(lines, *map(int, steps))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    trained.save(out)  # embedlab encode IN OUT ckpt=OUT
