from ffmem.progress import Progress
from ffmem.training import live
from ffmem.training.live import told


def test_a_line_tells_loss_perplexity_and_speed():
    assert told(2.0, None, 1234.4) == "loss 2.000, perplexity 7.4, 1,234 tokens/s"
    assert told(2.0, 9.0, 1.0) == "loss 2.000, perplexity 7.4, valid 9.0, 1 tokens/s"
    assert "∞" in told(1e4, None, 1.0)


def test_without_a_terminal_a_line_is_said_now_and_then(monkeypatch, capsys):
    with live.live(Progress(), 100, 0) as shown:
        shown.show(1, 2.0, None, 10.0)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(live, "EVERY", 0.0)
        shown.show(2, 2.0, None, 10.0)
        assert capsys.readouterr().err.startswith("Step 2 of 100: loss 2.000")


def test_who_wants_quiet_gets_it(monkeypatch, capsys):
    monkeypatch.setattr(live, "EVERY", 0.0)
    with live.live(Progress(quiet=True), 100, 0) as shown:
        shown.show(1, 2.0, None, 10.0)
    assert capsys.readouterr().err == ""
