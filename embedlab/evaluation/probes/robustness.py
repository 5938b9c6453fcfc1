"""How STS scores change under surface noise, and how they depend on the length of the sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from embedlab.errors import UserError
from embedlab.evaluation.core.correlation import spearman
from embedlab.evaluation.core.settings import whole
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Vectors
from embedlab.evaluation.probes.noise import NOISES, perturb
from embedlab.evaluation.sts.sts import STSPairs, all_sentences, load_tasks, score_tasks

DEFAULT_RATE = 0.2
LENGTHS = ((1, 10), (11, 20), (21, 32), (33, None))
"""Buckets by the tokens of a pair's longer sentence: its words and punctuation marks, which an encoder's
tokenizer can only cut further. The last bucket is what a maximum of 32 tokens in training never saw whole.
"""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_FEW = 30


class Robustness(Suite):
    """STS under noise, and by length.

    Settings: data_dir (STS files; None: the hub), tasks (STS tasks, default all seven), sts_text (raw, tok),
    noises (default all of typos, case, punctuation, truncation; []: none, the lengths alone), noise_rate (a
    number for all, or one for each by name; default 0.2), noise_seed (0). Noise falls on both sentences of a
    pair.

    Scores x100, Spearman "all": "sts12/spearman" clean, "sts12_typos/spearman" with noise,
    "sts12_typos/change" the difference in points; "sts7_typos/change" for all seven. By length
    "length_33+/spearman", ...: the pairs of the tasks rated from 0 to 5 (not SICK-R) together, each pair
    once.
    """

    name = "robustness"
    folders = ("sts",)
    keys = ("tasks", "sts_text", "noises", "noise_rate", "noise_seed")

    def load(self, settings: Settings) -> list[STSPairs]:
        """The tasks without noise."""
        _rates(settings.get("noises"), settings.get("noise_rate"))
        whole(settings, "noise_seed", 0, least=0)
        return load_tasks(settings, variants=NOISES)

    def score(self, encoder: Encoder, data: list[STSPairs], settings: Settings) -> Scored:
        """Spearman with and without noise, and by length."""
        rates = _rates(settings.get("noises"), settings.get("noise_rate"))
        seed = whole(settings, "noise_seed", 0, least=0)
        vectors = Vectors(encoder, all_sentences(data))
        scores = {
            key: value for key, value in score_tasks(vectors, data).items() if key.endswith("/spearman")
        }
        base = dict(scores)
        by_length, counts = score_lengths(vectors, data)
        scores |= by_length
        changed = {}
        for noise, rate in rates.items():
            noisy = [noisy_pairs(pairs, noise, rate, seed) for pairs in data]
            found = score_tasks(Vectors(encoder, all_sentences(noisy)), noisy)
            for key, value in base.items():
                task = key.partition("/")[0]
                scores[f"{task}_{noise}/spearman"] = found[key]
                scores[f"{task}_{noise}/change"] = found[key] - value
            changed[noise] = _share_changed(data, noisy)
        warnings = [
            f"length {bucket} has {n} pairs: its score says little"
            for bucket, n in counts.items()
            if n < _FEW
        ]
        return self.result(
            encoder,
            scores,
            name="sts_robustness",
            aggregation="all",
            text=data[0].text,
            sentences=vectors.sentences,
            data={pairs.task: pairs.counts() for pairs in data},
            warnings=warnings,
            notes=[
                "lengths are words and punctuation marks of the longer sentence",
                *(note for pairs in data for note in pairs.notes),
            ],
            seed=seed,
            noise_rates=rates,
            sentences_changed=changed,
            length_pairs=counts,
        )


def noisy_pairs(pairs: STSPairs, noise: str, rate: float, seed: int) -> STSPairs:
    """The pairs with noise on both sentences."""
    sides = [[perturb(s, noise, rate, seed) for s in side] for side in (pairs.first, pairs.second)]
    return replace(pairs, first=sides[0], second=sides[1])


def score_lengths(vectors: Vectors, tasks: Sequence[STSPairs]) -> tuple[dict[str, float], dict[str, int]]:
    """("length_1-10/spearman" -> score x100, "1-10" -> number of pairs), over the pairs rated from 0 to 5.

    STS-B holds pairs of STS12-16: a pair that came before is left out. A bucket of fewer than two pairs has
    no score.
    """
    pairs: dict[tuple[str, str], float] = {}
    for task in tasks:
        if task.task != "sickr":
            for first, second, gold in zip(task.first, task.second, task.gold, strict=True):
                pairs.setdefault((first, second), float(gold))
    longest = np.array([max(len(_TOKEN.findall(side)) for side in pair) for pair in pairs])
    scores: dict[str, float] = {}
    counts: dict[str, int] = {}
    if not pairs:
        return scores, counts
    cosine = vectors.cosine([a for a, _ in pairs], [b for _, b in pairs])
    gold = torch.tensor(list(pairs.values()), dtype=torch.float64)
    for low, high in LENGTHS:
        name = f"{low}+" if high is None else f"{low}-{high}"
        # An empty sentence has no token; it belongs to the shortest ones.
        chosen = torch.from_numpy((longest >= (low if low > 1 else 0)) & (longest <= (high or longest.max())))
        counts[name] = int(chosen.sum())
        if counts[name] >= 2:
            scores[f"length_{name}/spearman"] = 100 * float(spearman(cosine[chosen], gold[chosen]))
    return scores, counts


def _share_changed(clean: Sequence[STSPairs], noisy: Sequence[STSPairs]) -> float:
    """Share of sentences that the noise changed at all."""
    before, after = all_sentences(clean), all_sentences(noisy)
    return round(float(np.mean([a != b for a, b in zip(before, after, strict=True)])), 4)


def _rates(noises: str | Sequence[str] | None, rate: float | Mapping[str, float] | None) -> dict[str, float]:
    """Noise -> rate; bad names and rates fail here, before anything is encoded."""
    names = list(noises.split(",") if isinstance(noises, str) else NOISES if noises is None else noises)
    given = (
        rate if isinstance(rate, Mapping) else dict.fromkeys(names, DEFAULT_RATE if rate is None else rate)
    )
    rates = {name: given.get(name, DEFAULT_RATE) for name in [*names, *given]}
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError("is not a number", key="noise_rate", value=value, fix="noise_rate=0.2")
        perturb("", name, value, 0)
    return {name: float(rates[name]) for name in names}
