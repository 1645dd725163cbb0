"""Ctrl-C at any moment: a lens leaves nothing, and the model is as it was."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from transformers import DebertaV2Config, DebertaV2Model

from attnlens import (
    EffectiveAttention,
    HeadStatistics,
    HiddenTokenAttribution,
    Lens,
    Observer,
    mask_heads,
)
from attnlens.attention import Recording
from attnlens.tap.interrupts import uninterrupted
from attnlens.tap.shared import ThreadDepth, replaced
from tests.support import models
from tests.support.hooks import hooks, is_clean

SIGNALS = int(os.environ.get("ATTNLENS_TEST_SIGNALS", "40"))
OBSERVERS: tuple[Callable[[], Observer], ...] = (
    HeadStatistics,
    EffectiveAttention,
    Recording,
    HiddenTokenAttribution,
)


def deberta() -> nn.Module:
    torch.manual_seed(0)
    sizes = {**models.SIZES, "vocab_size": models.VOCABULARY}
    return DebertaV2Model(DebertaV2Config(**sizes, relative_attention=True)).eval()


def interrupted(work: Callable[[], None], delay: float) -> None:
    """Run something, and send this process a real SIGINT after a delay."""

    def send() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        work()
        while True:  # the signal has yet to come
            time.sleep(0.001)
    except KeyboardInterrupt:
        pass
    sender.join()


@pytest.mark.parametrize("name", ["bert", "deberta"])
def test_interrupts_at_random_moments_leave_nothing(name: str) -> None:
    model = deberta() if name == "deberta" else models.build("bert")
    inputs = models.text_inputs((7, 4))
    chance = random.Random(0)
    stance = eval_frame._stance
    handler = signal.getsignal(signal.SIGINT)

    def look(observer: Observer) -> None:
        with Lens(model, observer), torch.no_grad():
            model(**inputs)

    with torch.no_grad():
        expected = model(**inputs)[0]
    look(HeadStatistics())
    gc.collect()
    gc.freeze()  # what is there already need not be looked at again each time
    start = time.perf_counter()
    look(HeadStatistics())
    duration = time.perf_counter() - start
    for number in range(SIGNALS // 2):
        observer = OBSERVERS[number % len(OBSERVERS)]()
        interrupted(lambda seen=observer: look(seen), chance.uniform(0, 1.5 * duration))
        gc.collect()
        assert is_clean(model), number
        assert eval_frame._stance is stance
        assert signal.getsignal(signal.SIGINT) is handler
        assert not torch.overrides._get_current_function_mode_stack()
        with torch.no_grad():
            assert torch.equal(model(**inputs)[0], expected)
    gc.unfreeze()
    statistics = HeadStatistics()
    look(statistics)
    assert len(statistics.compute().layers) == models.LAYERS


def test_an_interrupt_waits_for_the_end_of_a_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            steps.append("went on")
        steps.append("not reached")
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_is_held_back_in_other_threads() -> None:
    steps = []

    def work() -> None:
        with uninterrupted():
            steps.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == [signal.default_int_handler]


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_lens_that_is_dropped_detaches(name: str) -> None:
    model = models.build(name)
    gc.disable()
    try:
        lens = Lens(model, HeadStatistics(), HiddenTokenAttribution())
        lens.__enter__()
        model(**models.inputs(name))
        assert hooks(model)
        del lens
        assert is_clean(model)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["bert", "deberta"])
def test_an_interrupt_while_heads_are_masked_leaves_nothing(name: str) -> None:
    model = deberta() if name == "deberta" else models.build("bert")
    with pytest.raises(KeyboardInterrupt), mask_heads(model, {0: [1]}, "mean"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert is_clean(model)


def test_a_depth_that_was_interrupted_is_restored() -> None:
    depth = ThreadDepth()
    with pytest.raises(KeyboardInterrupt), depth.entered():
        raise KeyboardInterrupt
    assert not depth


def test_what_someone_else_put_in_place_stays() -> None:
    class Owner:
        value = 1

    with replaced(Owner, "value", 2):
        Owner.value = 3
    assert Owner.value == 3


def test_ctrl_c_still_ends_a_program_inside_a_lens() -> None:
    program = (
        "import os, signal, time\n"
        "from attnlens import Lens\n"
        "from tests.support import models\n"
        "with Lens(models.build('bert')):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert "KeyboardInterrupt" in ended.stderr
