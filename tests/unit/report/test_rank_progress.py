from posttrain.report.rank_progress import PROGRESS_VARIABLE, name_silent, take_silent


def test_an_engine_that_is_named_is_taken_once(tmp_path, monkeypatch):
    progress = tmp_path / "rank0.progress"
    assert take_silent(progress) == ""
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    name_silent("http://a:1")
    assert list(tmp_path.iterdir()) == [], "nobody has asked for it"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(progress))
    for url in ("http://a:1", "http://b:2"):
        name_silent(url)
    assert take_silent(progress) == "http://b:2"
    assert take_silent(progress) == ""
