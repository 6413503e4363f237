from ffmem import demo
from tests.indexing.folders import write_corpus


def test_the_demonstration_indexes_and_shows(tmp_path, monkeypatch, capsys, model_folder):
    """The real path, with a tiny model and text in place of those that are downloaded."""
    monkeypatch.setattr(demo, "MODEL", str(model_folder))
    monkeypatch.setattr(demo, "CORPUS", str(write_corpus(tmp_path / "corpus.txt")))
    monkeypatch.setattr(demo, "VALID", str(write_corpus(tmp_path / "valid.txt", seed=1)))
    monkeypatch.setattr(demo, "SIZES", {"sample": 20, "per_layer": 1, "triggers": 2})
    monkeypatch.setattr(demo, "WORDS", ("e",))
    index = demo.demo(tmp_path / "demo", limit=40)
    shown = capsys.readouterr().out
    assert index.manifest.corpus.sentences <= 40
    assert "'e'" in shown
    assert "promotes" in shown
    assert (tmp_path / "demo-report/report.html").exists()
    assert str(tmp_path / "demo-report/report.html") in shown
    assert f"ffmem show {tmp_path / 'demo'} L" in shown
