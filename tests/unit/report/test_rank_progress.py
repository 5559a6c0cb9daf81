from posttrain.report.rank_progress import PROGRESS_VARIABLE, report_unresponsive_engine, take_unresponsive_engine


def test_an_engine_that_is_named_is_taken_once(tmp_path, monkeypatch):
    progress = tmp_path / "rank0.progress"
    assert take_unresponsive_engine(progress) == ""
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    report_unresponsive_engine("http://a:1")
    assert list(tmp_path.iterdir()) == [], "nobody has asked for it"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(progress))
    for url in ("http://a:1", "http://b:2"):
        report_unresponsive_engine(url)
    assert take_unresponsive_engine(progress) == "http://b:2"
    assert take_unresponsive_engine(progress) == ""
