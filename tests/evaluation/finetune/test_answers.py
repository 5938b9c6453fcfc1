"""Normalisation, exact match and F1 against cases worked by hand from MLQA's and SQuAD's definitions."""

from __future__ import annotations

import pytest

from embedlab.evaluation.finetune.answers import exact, f1, mlqa_words, scores, squad_words


@pytest.mark.parametrize(
    ("answer", "language", "words"),
    [
        ("The  Old Man, and a Sea!", "en", ["old", "man", "and", "sea"]),
        ("Theatre", "en", ["theatre"]),
        ("Die Mauer („der Wall“)", "de", ["mauer", "wall"]),
        ("the Mauer", "de", ["the", "mauer"]),
        ("La casa de las flores", "es", ["casa", "de", "flores"]),
        ("những ngôi nhà của tôi", "vi", ["ngôi", "nhà", "tôi"]),
        ("البيت الكبير", "ar", ["بيت", "كبير"]),
        ("एक घर।", "hi", ["एक", "घर"]),
        ("北京，1998年", "zh", ["北", "京", "1998", "年"]),
        ("IBM 公司", "zh", ["ibm", "公", "司"]),
        ("東京タワー", "ja", ["東", "京", "タ", "ワ", "ー"]),
        ("서울 특별시", "ko", ["서울", "특별시"]),
        ("в 1998 году", "ru", ["в", "1998", "году"]),
        ("...", "en", []),
    ],
)
def test_words_by_language(answer: str, language: str, words: list[str]) -> None:
    assert mlqa_words(answer, language) == words


def test_squad_knows_english_articles_and_ascii_punctuation_only() -> None:
    assert squad_words("The „Wall“, a wall.") == ["„wall“", "wall"]
    assert squad_words("北京，1998年") == ["北京，1998年"]


def test_exact_and_f1_by_hand() -> None:
    assert exact(["a", "b"], ["a", "b"]) == 1
    assert exact(["b", "a"], ["a", "b"]) == 0
    assert f1(["x", "y", "z"], ["y", "z"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1(["y", "y"], ["y"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1([], ["a"]) == 0


def test_means_over_questions_take_the_best_right_answer() -> None:
    found = scores(["北京", "上海市"], [["北京", "京"], ["上海"]], "zh")
    assert found["em"] == 50
    assert found["f1"] == pytest.approx(100 * (1 + 0.8) / 2)
    # At spaces a Chinese answer is one word: all or nothing.
    assert found["f1_squad"] == found["em_squad"] == 50
    with pytest.raises(ValueError, match="0 predictions"):
        scores([], [], "en")
