"""What languages leave in the vectors: spectrum by language, cosine of translations, language probe, purity.

On a table of translations (NTREX by default), so that languages differ in nothing but language. Before and
after an alignment such as BEPA's these numbers say what its t-SNE maps show: clusters by language dissolve,
the first principal component loses its share, translations come closer than other sentences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedlab.errors import UserError, one_of
from embedlab.evaluation.bitext.parallel_texts import NTREX, ParallelTable, parallel_table
from embedlab.evaluation.core import geometry
from embedlab.evaluation.core.correlation import flat
from embedlab.evaluation.core.nearest import TopK, unit
from embedlab.evaluation.core.settings import folder_of, limit_note, names, row_limit, scoring_device, whole
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.table import Scores, Table, protocol_line, task_table
from embedlab.evaluation.core.vectors import Encoder, Vectors

SEED = 0
LIMIT = 1000
_L2 = (1e-5, 1e-4, 1e-3, 1e-2)
_KEPT = 256  # singular values in the protocol block


def spectrum(vectors: Tensor) -> dict[str, float]:
    """Of unit rows [n, D]: rankme (un-centred), effective_rank, pc1_share, pc10_share and pc20_share
    (centred: shares of the variance on the first 1, 10 and 20 components), mean_cosine."""
    rows = geometry.unit(vectors)
    variance = geometry.singular_values(rows, center=True).square()
    share = variance.cumsum(0) / variance.sum().clamp_min(torch.finfo(variance.dtype).tiny)
    return {
        "rankme": float(geometry.rankme(rows)),
        "effective_rank": float(geometry.effective_rank(rows)),
        **{f"pc{k}_share": float(share[min(k, len(share)) - 1]) for k in (1, 10, 20)},
        "mean_cosine": float(geometry.mean_cosine(rows)),
    }


def pair_cosines(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cosine of translations and of all other pairs, for each two languages.

    vectors: [languages, n, D], row i of each the same sentence. Returns related and unrelated, both
    [languages, languages] in float64; unrelated leaves out the n pairs of the same row (NaN for n = 1), so its
    diagonal is the mean cosine inside a language, and related's diagonal is 1.
    """
    rows = geometry.unit(vectors)
    n = rows.shape[1]
    same = torch.einsum("and,bnd->ab", rows, rows)
    total = rows.sum(dim=1)
    return same / n, (total @ total.T - same) / (n * (n - 1) if n > 1 else float("nan"))


def purity(vectors: Tensor, labels: Tensor, k: int = 10) -> Tensor:
    """Share of each row's `k` nearest other rows (by cosine) with its own label, [n, D] and [n] -> [n]."""
    rows = unit(vectors)
    top = TopK(rows, min(k + 1, len(rows)))
    top.add(rows)
    others = top.rows != torch.arange(len(rows), device=rows.device)[:, None]
    # A row is its own nearest one, except among k + 1 or more equal ones: there the last is left out instead.
    others[:, -1] &= ~others.all(dim=1)
    same = (labels[top.rows] == labels[:, None]) & others
    return same.sum(dim=1) / others.sum(dim=1).clamp_min(1)


def probe_accuracy(vectors: Tensor, labels: Tensor, groups: Tensor, seed: int = SEED) -> float:
    """Test accuracy in percent of a linear classifier that names the label of a vector.

    vectors [n, D]; labels [n] from 0; groups [n]: rows of one group (translations of one sentence) stay on
    one side of the split: 60 % of the groups train, 20 % choose L2 and stop, 20 % are the score.

    Raises UserError for fewer than 5 groups.
    """
    kinds = groups.unique()
    _check_probe(len(kinds))
    order = np.random.default_rng(seed).permutation(kinds.cpu().numpy())
    cuts = [int(0.6 * len(order)), int(0.8 * len(order))]
    parts = [np.flatnonzero(np.isin(groups.cpu().numpy(), part)) for part in np.split(order, cuts)]
    rows = geometry.unit(vectors).float()
    # Standardised by the training rows: collapsed directions would otherwise need a huge weight.
    mean, spread = rows[parts[0]].mean(dim=0), rows[parts[0]].std(dim=0).clamp_min(1e-6)
    x = (rows - mean) / spread
    split = [(x[part], labels[part]) for part in map(torch.from_numpy, parts)]
    weights = [_softmax_regression(*split[0], int(labels.max()) + 1, l2) for l2 in _L2]
    on_dev = [_correct(weight, *split[1]) for weight in weights]
    return 100 * _correct(weights[int(np.argmax(on_dev))], *split[2])


def _check_probe(sentences: int, file: str | None = None) -> None:
    if sentences < 5:
        raise UserError(f"too few sentences for a probe: {sentences}", file=file, fix="5 or more")


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1)


def _correct(weight: Tensor, x: Tensor, labels: Tensor) -> float:
    return float(((_with_bias(x) @ weight).argmax(dim=1) == labels).double().mean())


def _softmax_regression(x: Tensor, labels: Tensor, classes: int, l2: float) -> Tensor:
    """Weights [D + 1, classes] that minimise the mean cross-entropy plus l2 / 2 of their squared length."""
    x = _with_bias(x)
    weight = x.new_zeros(x.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight, labels) + l2 / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return weight.detach()


class Languages(Suite):
    """What languages leave in the vectors.

    Settings: data_dir (folder of parallel/), table (file stem, NTREX), pivot
    (first language), languages, limit (sentences of each language, 1,000), neighbours (10), device, figure
    (FILE.png: spectrum by language), map (FILE.png: map of the sentences) and projection (tsne, umap).

    Scores, per language under "spectrum-deu/...": `spectrum`; over all sentences "spectrum/..."; cosines
    "cosine-eng-deu/related", "/unrelated", "/gap" with the pivot, and their means "cosine/..." over all pairs
    of languages; "identity/accuracy" (language probe, percent), "identity/chance", "purity/knn" (percent),
    "purity/chance". The protocol block holds singular values by language and both cosine matrices.
    """

    name = "languages"
    folders = ("parallel",)
    hub = False
    keys = ("languages", "limit", "table", "pivot", "neighbours", "figure", "map", "projection")
    pictures = ("figure", "map")

    def load(self, settings: Settings) -> ParallelTable:
        """The table of translations."""
        folder, limit = folder_of(settings, "parallel"), row_limit(settings, LIMIT)
        table = parallel_table(folder, settings.get("table") or NTREX, names(settings, "languages"), limit)
        _check_probe(len(table), table.source)
        pivot = str(settings.get("pivot") or table.languages[0])
        if pivot not in table.languages:
            raise UserError("is not there", key="pivot", value=pivot, fix=one_of(pivot, table.languages))
        whole(settings, "neighbours", 10)
        return table

    def score(self, encoder: Encoder, data: ParallelTable, settings: Settings) -> Scored:
        """Spectra, cosines, probe and purity."""
        pivot = str(settings.get("pivot") or data.languages[0])
        neighbours = whole(settings, "neighbours", 10)
        vectors = Vectors(encoder, [text for texts in data.texts.values() for text in texts])
        vectors.matrix = vectors.matrix.to(scoring_device(settings.get("device")))
        stack = torch.stack([vectors.take(texts) for texts in data.texts.values()])  # [languages, n, D]
        scores, values = _spectra(data, stack)
        related, unrelated = pair_cosines(stack)
        scores |= _cosine_scores(data, pivot, related, unrelated)
        scores |= _language_scores(stack, neighbours)
        if settings.get("map"):
            from embedlab.evaluation.core import figures

            how = str(settings.get("projection") or "tsne")
            figures.save_map(stack.cpu().numpy(), data.languages, str(settings["map"]), how)
        return self.result(
            encoder,
            scores,
            name="language_geometry",
            aggregation=f"{len(data)} sentences in each of {len(data.languages)} languages",
            sentences=vectors.sentences,
            data={
                "table": {
                    "source": data.source,
                    "languages": data.languages,
                    "rows": len(data),
                    "dropped": dict(data.dropped),
                }
            },
            warnings=limit_note(settings.get("limit")),
            notes=[
                "unit rows; pc*_share and effective_rank centred, rankme not",
                "probe: standardised unit rows, linear softmax, 60/20/20 split by sentence",
            ],
            seed=SEED,
            neighbours=neighbours,
            singular_values=values,
            cosine={
                "languages": data.languages,
                "related": related.cpu().numpy().round(5).tolist(),
                "unrelated": unrelated.cpu().numpy().round(5).tolist(),
            },
        )

    def figures(self, scores: Scores, protocol: Mapping[str, Any], settings: Settings) -> None:
        """The spectrum by language, where a file is named for it."""
        if settings.get("figure"):
            from embedlab.evaluation.core import figures

            figures.save_spectrum(protocol["singular_values"], str(settings["figure"]))

    def tables(self, name: str, scores: Scores, protocol: Mapping[str, Any]) -> list[Table]:
        """A table for each kind of score."""
        groups = dict.fromkeys(key.partition("/")[0].partition("-")[0] for key in scores)
        parts = {g: {k: v for k, v in scores.items() if re.match(f"{g}[-/]", k)} for g in groups}
        last, caption = list(groups)[-1], protocol_line(protocol)
        return [
            task_table(part, 1, self.title(name), caption if g == last else "") for g, part in parts.items()
        ]


def _spectra(table: ParallelTable, stack: Tensor) -> tuple[dict[str, float], dict[str, list[float]]]:
    sets = {"spectrum": stack.flatten(0, 1)}
    sets |= {f"spectrum-{name}": rows for name, rows in zip(table.languages, stack, strict=True)}
    scores: dict[str, float] = {}
    values: dict[str, list[float]] = {}
    for name, rows in sets.items():
        scores |= {f"{name}/{metric}": value for metric, value in spectrum(rows).items()}
        centred = geometry.singular_values(geometry.unit(rows), center=True)[:_KEPT]
        values[name.removeprefix("spectrum-") if name != "spectrum" else "all"] = [
            float(f"{value:.5g}") for value in centred.tolist()
        ]
    return scores, values


def _cosine_scores(table: ParallelTable, pivot: str, related: Tensor, unrelated: Tensor) -> dict[str, float]:
    at = table.languages.index(pivot)
    apart = ~torch.eye(len(table.languages), dtype=torch.bool, device=related.device)
    sets = {"cosine": (related[apart].mean(), unrelated[apart].mean())}
    for i, name in enumerate(table.languages):
        if i != at:
            sets[f"cosine-{pivot}-{name}"] = (related[at, i], unrelated[at, i])
    means = {name: (float(close), float(far)) for name, (close, far) in sets.items()}
    return flat({name: {"related": c, "unrelated": f, "gap": c - f} for name, (c, f) in means.items()})


def _language_scores(stack: Tensor, neighbours: int) -> dict[str, float]:
    count, n, _ = stack.shape
    rows = stack.flatten(0, 1)
    labels = torch.arange(count, device=rows.device).repeat_interleave(n)
    groups = torch.arange(n, device=rows.device).repeat(count)
    return {
        "identity/accuracy": probe_accuracy(rows, labels, groups),
        "identity/chance": 100 / count,
        "purity/knn": 100 * float(purity(rows, labels, neighbours).mean()),
        "purity/chance": 100 * (n - 1) / (count * n - 1),
    }
