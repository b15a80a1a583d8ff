"""Environments and tools that answer the policy's turns, in processes of their own.

An environment is a class with an instance for every conversation; settings name it as one of `protocol.READY`,
`path/file.py:Class` or `package.module:Class`. It is made without arguments, and all of its methods are optional:

    def reset(self, **row) -> str | None: ...  # begins; gets the data's row and `seed`; a text extends the prompt
    def any_name(self, guess: int) -> str: ...  # every other public method is a tool
    def reply(self, text: str) -> str | None: ...  # instead of tools: answers a turn, None ends the conversation
    def get_reward(self) -> float: ...  # of the finished conversation
    def get_turn_rewards(self, calls: list[int]) -> list[float]: ...  # in addition, of each of the policy's turns

`get_turn_rewards` returns a reward for each turn that ended by itself, and none for a turn that the token limit cuts
off. In `gae`, `reinforce_plus_plus` and `remax` they count at the ends of turns, everywhere else their sum counts.
`calls`, which may be left out, has each turn's number of readable calls of tools, or of calls of `reply`. If the method
raises, or returns another number of rewards, the conversation has no reward of its environment.

A tool may also be a plain function. It has a type for each argument, and a docstring in Google's style, from which the
model learns its purpose. It returns text or a JSON value, may be `async`, and its printed output is dropped. With
`rollout.tool_images` a tool, `reset` and `reply` may show images, too (`results.image_parts`).
"""
