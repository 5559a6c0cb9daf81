from posttrain.checkpoint.quantization.coverage import MOST_NAMED, coverage, describe_coverage

COUNTS = [[0, 0, 0], [5, 0, 40], [7, 8, 10]]


def test_experts_that_were_never_reached_are_listed() -> None:
    found = coverage(COUNTS, first_layer=1)
    assert found["never"] == 1
    assert found["layers"]["1"] == {"min": 0, "median": 5, "max": 40, "never": [1], "tokens": [5, 0, 40]}
    assert set(found["layers"]) == {"1", "2"}
    told = describe_coverage(found)
    assert told.startswith("tokens per expert: median 5 to 8 over layers, least 0 (layer 1)")
    assert "1 never reached, which take the largest magnitude of their layer (layer 1: 1)" in told


def test_where_all_were_reached_nothing_is_told_of_it() -> None:
    assert describe_coverage(coverage(COUNTS, 2)) == "tokens per expert: median 8 to 8 over layers, least 7 (layer 2)"


def test_of_many_layers_the_first_are_named() -> None:
    told = describe_coverage(coverage([[0, 1]] * (MOST_NAMED + 1), 0))
    assert "layer 4: 0; ...)" in told
