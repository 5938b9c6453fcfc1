"""Technical prose of an encyclopedia: articles many of whose words are terms, and new pieces cut from them.

The terms are those of school and first-year books, by subject. None was taken from a set on which a result is scored.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence

TECHNICAL = 0.02
"""Part of an article's words that are terms, from which on it is technical."""
WORDS = (75, 170)
"""After so many, at random, a piece ends with the sentence: 100 to 256 tokens."""
_TERMS = {
    "physics": (
        "acceleration amplitude atom atomic conductivity convection density diffraction diffusion electric electrical "
        "electromagnetic electron electrostatic energy entropy fluid frequency friction gravitational heat inertia "
        "insulator kinetic laser magnetic mass momentum neutron nucleus optical oscillation particle photon plasma "
        "pressure proton quantum radiation radioactive refraction relativity resonance spectrum temperature thermal "
        "thermodynamic torque turbulence turbulent vacuum velocity vibration viscosity viscous voltage wave "
        "wavelength"
    ),
    "engineering": (
        "alloy amplifier antenna bandwidth battery beam bearing capacitor circuit coil compressor cooling corrosion "
        "current cylinder deformation diameter diode efficiency elastic electrode electronic engine fatigue feedback "
        "filter fracture generator hydraulic insulation lens load mechanical mechanism modulation motor nozzle output "
        "piston pump reactor rotor semiconductor sensor shaft shear signal steam stiffness strain stress structural "
        "tensile tension thickness transistor turbine valve welding"
    ),
    "mathematics": (
        "algebra algebraic algorithm angle approximation asymptotic axiom axis calculus coefficient computation "
        "continuous convergence convex coordinate curvature derivative deviation differential dimension dimensional "
        "eigenvalue ellipse equation exponential finite formula function geometric geometry infinite integer integral "
        "interval inverse linear logarithm mathematical matrix nonlinear numerical orthogonal parameter polynomial "
        "probability proof random ratio scalar sphere spherical statistical symmetry tensor theorem topology variable "
        "variance vector"
    ),
    "chemistry": (
        "acid alkali ammonia aqueous bond carbon catalyst chemical chemistry chloride combustion compound "
        "concentration copper crystal crystalline electrolyte equilibrium ester ethanol evaporation gas helium "
        "hydrocarbon hydrogen hydroxide inorganic ion ionic isotope liquid methane mixture molar molecular molecule "
        "nitrate nitrogen organic oxidation oxide oxygen polymer potassium reaction reagent silicon sodium solid "
        "solubility soluble solvent sulfate sulfur synthesis vapor"
    ),
    "medicine": (
        "acute anatomy antibiotic antibody artery bacteria bacterial blood bone cancer cardiac cardiovascular chronic "
        "clinical diagnosis diagnostic disease disorder dose drug fever hormone immune infection inflammation "
        "inflammatory insulin kidney lesion liver lung medication mortality muscle nerve patient placebo pulmonary "
        "renal respiratory surgical symptom syndrome therapeutic therapy tissue toxic toxicity treatment tumor "
        "vaccine vascular viral virus"
    ),
    "biology": (
        "amino antigen biological cell cellular chromosome cortex dna embryo enzyme evolutionary gene genetic genome "
        "glucose inhibitor lipid membrane metabolic metabolism microbial mitochondria mutation neural neuron nutrient "
        "organism pathogen peptide phenotype photosynthesis physiological protein receptor replication rna secretion "
        "stem synaptic transcription"
    ),
    "any": (
        "computational correlation empirical experiment experimental hypothesis laboratory measurement phenomenon "
        "quantitative simulation theoretical"
    ),
}
TERMS = frozenset(word for words in _TERMS.values() for word in words.split())
_WORD = re.compile(r"[a-z]+")
_SENTENCE_END = re.compile(r"""(?<=[a-z0-9)\]"'][.!?]) +(?=[A-Z"'(])""")


def share(article: Sequence[str]) -> float:
    """Part of its words that are terms, in the singular or with an s."""
    words = [word for paragraph in article for word in _WORD.findall(paragraph.lower())]
    return sum(word in TERMS or word.removesuffix("s") in TERMS for word in words) / max(1, len(words))


def articles(lines: Iterable[str]) -> Iterator[list[str]]:
    """Paragraphs that follow one another without a blank line between."""
    article: list[str] = []
    for line in lines:
        if text := line.strip():
            article.append(text)
        elif article:
            yield article
            article = []
    if article:
        yield article


def sentences(article: Sequence[str]) -> list[str]:
    """Of its paragraphs, near enough."""
    return [text for paragraph in article for text in _SENTENCE_END.split(paragraph)]


def pieces(article: Sequence[str], drawn: random.Random) -> Iterator[str]:
    """The article's sentences joined over its paragraphs' ends and cut after random numbers of words.

    The first piece may be of any length, and is left out where it is short, so that each call cuts elsewhere.
    """
    least, most = WORDS
    piece: list[str] = []
    length, wanted = 0, drawn.randint(1, most)
    for sentence in sentences(article):
        piece.append(sentence)
        length += len(sentence.split())
        if length >= wanted:
            if length >= least:
                yield " ".join(piece)
            piece, length, wanted = [], 0, drawn.randint(least, most)
    if length >= least:
        yield " ".join(piece)


def prose(found: Sequence[Sequence[str]], count: int, seed: int = 42) -> list[str]:
    """Texts of technical articles: their paragraphs, then pieces of all of them, again and again.

    Args:
        found: the articles.
        count: of texts; the last time round, only some articles are cut, at random.
        seed: where they are cut.

    Returns:
        the texts, those of an article together, so that a file of them packs to little more than the articles.
    """
    drawn = random.Random(seed)
    texts = [dict.fromkeys(article) for article in found]
    order = list(range(len(found)))
    left, before = count - sum(map(len, texts)), count + 1
    while 0 < left < before:
        before = left
        drawn.shuffle(order)
        for place in order:
            new = [text for text in pieces(found[place], drawn) if text not in texts[place]]
            texts[place].update(dict.fromkeys(new[:left]))
            left = max(0, left - len(new))
    return [text for some in texts for text in some][:count]
