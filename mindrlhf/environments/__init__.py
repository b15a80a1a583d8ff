"""Environments and tools that answer the policy's turns, in processes of their own.

An environment is a class, of which every conversation has an instance; settings name it as one of `protocol.READY`,
`path/file.py:Class` or `package.module:Class`. It is made without arguments and has, all of them optional:

    def reset(self, **row) -> str | None: ...  # begins; gets the data's row and `seed`; a text goes on with the prompt
    def any_name(self, guess: int) -> str: ...  # every other public method is a tool
    def reply(self, text: str) -> str | None: ...  # instead of tools: answers a turn, None ends the conversation
    def get_reward(self) -> float: ...  # of the finished conversation
    def get_turn_rewards(self, calls: list[int]) -> list[float]: ...  # in addition, of each of the policy's turns

There is a reward for each turn that ended by itself, and none for one that the limit of tokens cuts off. Those of turns
count at their ends in `gae`, `reinforce_plus_plus` and `remax`, and their sum everywhere else. `calls`, which may be
left out, has each turn's number of calls of tools that could be read, or of `reply`. If `get_turn_rewards` raises, or
gives another number of rewards, the conversation has no reward of its environment.

A tool may as well be a plain function. It has a type for each argument, and a docstring in Google's style, from which
the model learns its purpose. It returns text, or what JSON can hold, may be `async`, and its printed output is dropped.
"""
