from posttrain.rl.data.overlap import Overlap, find_overlaps

LONG = "the quick brown fox jumps over the lazy dog and then it runs home to its den"
TEMPLATE = "solve the following problem step by step and put the final answer in a box at the end"


def _numbers(first: int) -> str:
    return " ".join(str(first + i) for i in range(13))


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not() -> None:
    for text in ("p q {}", "{}", "p q r s {} t"):
        assert find_overlaps({"a": [f"x {_numbers(100)} y"]}, [text.format(_numbers(100))]) == [Overlap("a", 0, 0)]
    twelve = " ".join(_numbers(100).split()[:-1])
    assert find_overlaps({"a": [f"x {_numbers(100)} y"]}, [f"p q {twelve} r s"]) == []
    assert find_overlaps({"a": [f"x {twelve}"]}, [f"p q {twelve}"]) == []


def test_case_punctuation_and_forms_of_letters_do_not_count() -> None:
    changed = LONG.upper().replace(" ", ",  ").replace("FI", "ﬁ")
    assert find_overlaps({"a": [LONG]}, ["other", changed]) == [Overlap("a", 0, 1)]


def test_a_short_prompt_must_be_the_same_as_a_whole() -> None:
    suites = {"sums": ["What is 2 + 3?", "What is 2 + 5?"], "more": ["what is 2 3"]}
    assert find_overlaps(suites, ["what is 2+4", "What is 2+3", "so what is 2 + 5"]) == [
        Overlap("sums", 0, 1),
        Overlap("more", 0, 1),
    ]


def test_words_of_a_template_do_not_count() -> None:
    suite = [f"{TEMPLATE} {word}" for word in ("one", "two", "three")]
    assert find_overlaps({"a": suite}, [f"{TEMPLATE} four", f"{TEMPLATE} two"]) == [Overlap("a", 1, 1)]


def test_the_first_training_prompt_is_told() -> None:
    assert find_overlaps({"a": [LONG]}, ["x", LONG, LONG]) == [Overlap("a", 0, 1)]


def test_what_one_of_a_hundred_prompts_shares_is_no_template() -> None:
    """Two prompts of 200 have the same question but for a word; of 199 that is more than one of a hundred."""
    for count, found in ((200, [Overlap("a", 0, 0), Overlap("a", 1, 0)]), (199, [])):
        suite = [f"{LONG} one", f"{LONG} two", *(f"number {i}" for i in range(count - 2))]
        assert find_overlaps({"a": suite}, [f"{LONG} three"]) == found


def test_prompts_of_a_suite_that_are_the_same_are_found_as_a_whole() -> None:
    assert find_overlaps({"a": ["what is it", "what is it"]}, ["What is it?"]) == [
        Overlap("a", 0, 0),
        Overlap("a", 1, 0),
    ]
