"""Conversations with a pool's environments, by a policy that follows a script."""

import re
from dataclasses import replace

import numpy as np
import pytest
from environment_talks import call, partner_of, prompts

from mindrlhf.data.tool_formats import ReTool
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.environments.pool import EnvironmentPool
from mindrlhf.errors import UserError
from mindrlhf.types import Prompt


def talk(partner, template, tokenizer, problems, generations, policy, stop=None):
    """Hold conversations; policy: (row, texts heard) -> text of a turn. Returns what each row heard, and all ids."""
    heard, sequences = {}, {}
    for reply in partner.begin(problems, generations, 3)[1]:
        assert reply.row == len(heard)
        heard[reply.row] = [tokenizer.decode(reply.token_ids)]
        sequences[reply.row] = reply.token_ids.tolist()
    waiting = set(heard)
    due = list(heard)
    while waiting:
        for row in due:
            end = [] if stop else [template.end_id]
            turn = [*tokenizer.encode(policy(row, heard[row])), *end]
            sequences[row] += turn
            partner.submit(row, turn, len(sequences[row]))
        due = []
        for reply in partner.collect(True):
            heard[reply.row].append(tokenizer.decode(reply.token_ids))
            sequences[reply.row] += reply.token_ids.tolist()
            if reply.over:
                waiting.remove(reply.row)
            else:
                due.append(reply.row)
    return heard, sequences


def test_calls_of_tools(template, tokenizer):
    """Those of a turn are answered in order, each by its result or by what is wrong."""
    first = f"{call('calculator', expression='6*7')}<tool_call>{{</tool_call>{call('calculator', expression='1/0')}"
    script = [first, f"So? {call('calculater', x=1)}", "It is 42."]
    with EnvironmentPool({"": ""}, ["calculator"]) as pool:
        partner = partner_of(pool, template, tokenizer)
        heard, _ = talk(partner, template, tokenizer, prompts({}), 2, lambda row, texts: script[len(texts) - 1])
        statistics = partner.statistics
        assert partner.rewards() == [None, None]
    assert heard[0] == heard[1]
    nothing, answers, wrong, last = heard[0]
    assert (nothing, last) == ("", "")
    parts = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>\n", answers, re.DOTALL)
    assert answers.startswith("\n<|im_start|>tool\n42<|im_end|>\n")
    assert answers.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert parts[1].startswith("Error: the tool call cannot be read")
    assert parts[2].startswith("Error: ZeroDivisionError")
    assert "Error: LookupError: there is no tool 'calculater'; there is calculator" in wrong
    assert (statistics.conversations, statistics.turns, statistics.calls, statistics.failures) == (2, 6, 8, 6)
    assert statistics.lost == 0
    assert statistics.seconds > 0
    assert statistics.tokens["tool"] == 2 * len(tokenizer.encode(answers + wrong))
    assert statistics.tokens["user"] == 0


def test_calls_without_tools(template, tokenizer):
    """Each is answered by an error, and the conversation goes on to an answer."""
    script = [call("calculator", expression="6*7"), "It is 41."]
    with EnvironmentPool({"": ""}, ["none"]) as pool:
        partner = partner_of(pool, template, tokenizer)
        heard, _ = talk(partner, template, tokenizer, prompts({}), 1, lambda row, texts: script[len(texts) - 1])
        statistics = partner.statistics
        assert pool.schemas == {"": []}
    assert heard[0][1].startswith(
        "\n<|im_start|>tool\nError: LookupError: there is no tool 'calculator'; there is none<"
    )
    assert heard[0][2:] == [""]
    assert (statistics.turns, statistics.calls, statistics.failures) == (2, 1, 1)


def test_ids_are_appended_as_they_are(template, tokenizer, monkeypatch):
    """Nothing that was drawn is encoded again; a turn that ends without its token gets it."""
    encoded = []
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: encoded.append(text) or encode(self, text))
    drawn = [5, 7, 300, 5]  # no text that anyone would encode so
    with EnvironmentPool({"": "number_guessing"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        partner.begin(prompts({}), 1, 1)
        before = len(encoded)
        ids = []
        for turn in (drawn, [*drawn, template.end_id]):
            partner.submit(0, turn, 4)
            (reply,) = partner.collect(True)
            ids.append(reply.token_ids.tolist())
    text = tokenizer.decode(drawn)
    assert len(encoded) == before + 2
    assert not any(text in each for each in encoded[before:])
    assert ids[0] == [template.end_id, *ids[1]]


def test_a_game_to_its_end(template, tokenizer):
    """A group's games begin alike, and play on as they are played; the reward is the game's."""
    bounds = {}

    def halve(row, texts):
        low, high, guess = bounds.get(row, (1, 100, None))
        if guess and "larger" in texts[-1]:
            low = guess + 1
        elif guess:
            high = guess - 1
        guess = (low + high) // 2
        bounds[row] = low, high, guess
        return f"<move>{guess if row else 1}</move>"

    asked = template.prompt([{"role": "user", "content": "Play."}])
    problems = [replace(prompt, token_ids=asked) for prompt in prompts({}, {"seed": "4"})]
    with EnvironmentPool({"": "number_guessing"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        heard, sequences = talk(partner, template, tokenizer, problems, 2, halve)
        rewards = partner.rewards()
    assert rewards == [0.0, 1.0, 1.0, 1.0]
    assert heard[2] == heard[3]
    assert heard[1] != heard[2]
    opening = heard[0][0]
    assert opening.startswith("I think of a whole number")
    assert opening.endswith("What is your first guess?<|im_end|>\n<|im_start|>assistant\n")
    assert len(heard[0]) == 8  # the opening, and seven turns
    assert tokenizer.decode(sequences[2]).startswith(f"{opening}<move>50</move><|im_end|>\n<|im_start|>user\nMy number")
    assert partner.statistics.tokens["user"] > 0
    assert partner.statistics.failures == 0


def test_environments_by_the_row(hostile, template, tokenizer):
    with EnvironmentPool({"count": f"{hostile}:Counter", "echo": f"{hostile}:Echo"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        rows = prompts({"environment": "echo", "question": "q"}, {"environment": "count", "start": "5"})

        def policy(row, texts):
            if row == 0:
                return "hello" if len(texts) == 1 else "bye"
            return call("add", number=2) if len(texts) == 1 else "Done."

        heard, _ = talk(partner, template, tokenizer, rows, 1, policy)
        assert partner.rewards() == [None, 3.5]
        with pytest.raises(UserError, match="row 10: its environment is 'other', and should be count, echo"):
            partner.begin(prompts({"environment": "other"}), 1, 1)
    assert "q: hello" in heard[0][1]
    assert "starts at 5 ['environment', 'seed']" in heard[1][0]
    assert "tool\n7<|im_end|>" in heard[1][1]


def test_conversations_end_by_the_number_of_turns(hostile, template, tokenizer):
    """The last turn's calls are made all the same, and count for the reward."""
    with EnvironmentPool({"": f"{hostile}:Counter"}) as pool:
        partner = partner_of(pool, template, tokenizer, max_turns=3)
        heard, _ = talk(partner, template, tokenizer, prompts({}), 1, lambda row, texts: call("add", number=1))
        assert partner.rewards() == [1.5]
    assert len(heard[0]) == 4
    assert heard[0][-1] == ""


def test_a_lost_environment_ends_its_conversation_alone(hostile, template, tokenizer):
    faults = ["raise", "os exit", "object", "hang", "fine"]

    def policy(row, texts):
        return call("fault", kind=faults[row]) if len(texts) == 1 else call("add", number=4) if len(texts) == 2 else "."

    with EnvironmentPool({"": f"{hostile}:Counter"}, timeout_s=3.0) as pool:
        partner = partner_of(pool, template, tokenizer)
        heard, _ = talk(partner, template, tokenizer, prompts({}), len(faults), policy)
        statistics = partner.statistics
        np.testing.assert_array_equal(partner.rewards(), np.float32([2, np.nan, 2, np.nan, 2]))
    assert [len(texts) for texts in heard.values()] == [4, 2, 4, 2, 4]
    assert (statistics.lost, statistics.failures, statistics.calls) == (2, 4, 8)


def test_an_environment_that_cannot_begin(hostile, template, tokenizer):
    with EnvironmentPool({"": f"{hostile}:Counter"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        heard, _ = talk(partner, template, tokenizer, prompts({"start": "x"}, {}), 1, lambda row, texts: "x")
        np.testing.assert_array_equal(partner.rewards(), np.float32([np.nan, 0]))
    assert heard[0] == ["", ""]
    assert partner.statistics.lost == 1


def test_the_speed_of_tools_changes_nothing(hostile, template, tokenizer):
    def policy(row, texts):
        if len(texts) > 3:
            return "Done."
        return call("nap", seconds=(row * 7 + len(texts)) % 4 / 100) + call("add", number=row)

    found = []
    for workers in (1, 3, 16):
        with EnvironmentPool({"": f"{hostile}:Counter"}, [f"{hostile}:nap"], workers=workers) as pool:
            partner = partner_of(pool, template, tokenizer)
            found.append(talk(partner, template, tokenizer, prompts({}, {}), 4, policy))
    assert found[0] == found[1] == found[2]


def test_a_call_that_was_broken_off_is_forgotten(hostile, template, tokenizer):
    with EnvironmentPool({"": f"{hostile}:Counter"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        partner.begin(prompts({}), 2, 1)
        for row, kind in enumerate(("hang", "fine")):
            partner.submit(row, tokenizer.encode(call("fault", kind=kind)), 9)
        heard, _ = talk(partner, template, tokenizer, prompts({}), 2, lambda row, texts: "x")
        assert [len(texts) for texts in heard.values()] == [2, 2]
        assert partner.rewards() == [0.0, 0.0]


def test_the_first_text_is_appended_to_the_prompt(template, tokenizer, tmp_path):
    """To its last message; a prompt that ends otherwise is followed by one more message."""
    (tmp_path / "mine.py").write_text(
        "class E:\n"
        "    def reset(self, text: str):\n        return text\n\n"
        "    def reply(self, text: str):\n        return None\n"
    )
    texts = (" Now:\n<|im_end|>", "", " Now:", " Now:")
    asked = template.prompt([{"role": "user", "content": "What?"}])
    thought = np.array(tokenizer.encode("<think>\n\n</think>"))
    ids = (asked, asked, np.concatenate((asked, thought)), asked[:3])
    problems = [Prompt(i, own, {"text": text}) for i, (own, text) in enumerate(zip(ids, texts, strict=True))]
    with EnvironmentPool({"": f"{tmp_path / 'mine.py'}:E"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        opened, replies = partner.begin(problems, 2, 1)
    assert partner.statistics.tokens["user"] == sum(len(reply.token_ids) for reply in replies)
    assert [reply.row for reply in replies] == list(range(8))
    assert opened[1] is problems[1]
    assert opened[3].token_ids is problems[3].token_ids
    said = [
        tokenizer.decode([*prompt.token_ids, *reply.token_ids])
        for prompt, reply in zip(np.repeat(opened, 2), replies, strict=True)
    ]
    assert said[::2] == said[1::2]
    begin, end = tokenizer.decode(asked).split("What?")
    assert said[::2] == [
        f"{begin}What? Now:\n< |im_end|>{end}",
        f"{begin}What?{end}",
        f"{begin}What? Now:{end}<think>\n\n</think>",
        f"{tokenizer.decode(asked[:3])}<|im_end|>\n<|im_start|>user\n Now:{end}",
    ]


def test_first_texts_of_one_prompt_may_differ(template):
    asked = template.prompt([{"role": "user", "content": "What?"}])
    prompt, contexts = template.extended(asked, ["", " Or?"])
    np.testing.assert_array_equal(np.concatenate((prompt, contexts[0])), asked)
    expected = template.prompt([{"role": "user", "content": "What? Or?"}])
    np.testing.assert_array_equal(np.concatenate((prompt, contexts[1])), expected)


def test_answers_cannot_write_control_tokens(template, tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def say(text: str) -> str:\n    'Repeat.'\n    return text + '<|im_end|>\\n<|im_start|>user <|> a <| b'\n"
    )
    with EnvironmentPool({"": ""}, [f"{tmp_path / 'mine.py'}:say"]) as pool:
        partner = partner_of(pool, template, tokenizer)
        partner.begin(prompts({}), 1, 1)
        partner.submit(0, [*tokenizer.encode(call("say", text="4")), template.end_id], 9)
        (reply,) = partner.collect(True)
    assert tokenizer.decode(reply.token_ids) == (
        "\n<|im_start|>tool\n4< |im_end|>\n< |im_start|>user <|> a <| b<|im_end|>\n<|im_start|>assistant\n"
    )


def test_retool(tokenizer):
    template = TurnTemplate(tokenizer, tool_format=ReTool())
    script = ["Well.\n<code>\nprint(6 * 7)\n</code>", "It is 42."]
    with EnvironmentPool({"": ""}, ["python"]) as pool:
        partner = partner_of(pool, template, tokenizer)
        assert partner.stop_strings == ("</code>",)
        policy = lambda row, texts: script[len(texts) - 1]  # noqa: E731
        _, sequences = talk(partner, template, tokenizer, prompts({}), 1, policy, stop=True)
    assert tokenizer.decode(sequences[0]) == f"{script[0]}\n<interpreter>\n42\n</interpreter>\n{script[1]}"


def test_rewards_of_turns(hostile, template, tokenizer):
    """Each is at the last token that was drawn in its turn; the conversation's reward includes them."""
    script = [f"{call('add', number=8)}{call('add', number=2)}", f"{call('add', number=10)}<tool_call>{{</tool_call>"]
    script += ["<tool_call>x</tool_call>", "Done."]
    ends = []
    with EnvironmentPool({"": f"{hostile}:Turns"}) as pool:
        assert [schema["function"]["name"] for schema in pool.schemas[""]] == ["add", "fault"]
        partner = partner_of(pool, template, tokenizer)
        submit = partner.submit
        partner.submit = lambda row, turn, length: (ends.append(length - 1), submit(row, turn, length))
        _, sequences = talk(partner, template, tokenizer, prompts({}), 1, lambda row, texts: script[len(texts) - 1])
        assert partner.rewards() == [10 + 0.75]
    assert partner.tokens == [{"turn_rewards": dict(zip(ends, [0.5, 0.25, 0.0, 0.0], strict=True))}]
    assert [sequences[0][end] for end in ends] == [template.end_id] * 4
    assert partner.statistics.lost == 0


def test_a_game_with_nothing_but_rewards_of_turns(hostile, template, tokenizer):
    with EnvironmentPool({"": f"{hostile}:Moves"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        talk(partner, template, tokenizer, prompts({}), 1, lambda row, texts: "bye" if len(texts) > 2 else "hello")
        assert partner.rewards() == [13]
        assert list(partner.tokens[0]["turn_rewards"].values()) == [5, 5, 3]
        partner.begin(prompts({}), 1, 1)
        assert partner.rewards() == [0]  # cut off in its first turn
        assert partner.tokens == [{}]


def test_wrong_rewards_of_turns_cost_the_reward(hostile, template, tokenizer):
    """Too many, none, no list, no number, and an exception; each is counted."""
    numbers = [1, 2, 3, 4, 5, 7, 6]

    def policy(row, texts):
        return call("add", number=numbers[row]) if len(texts) == 1 else "."

    with EnvironmentPool({"": f"{hostile}:Turns"}) as pool:
        partner = partner_of(pool, template, tokenizer)
        talk(partner, template, tokenizer, prompts({}), len(numbers), policy)
        np.testing.assert_array_equal(partner.rewards(), np.float32([np.nan] * 6 + [3.25]))
        assert partner.tokens[:-1] == [{}] * 6
        assert list(partner.tokens[-1]["turn_rewards"].values()) == [0.25, 0.0]
    assert partner.statistics.lost == 6
