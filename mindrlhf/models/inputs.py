"""Inputs of a decoder's graphs, by the names of their entries. Pure Python.

Outside of graphs a batch's arrays are a mapping (`types.TrainBatch.model_inputs`); inside they are tuples, whose
entries the constants below name: MindSpore fails to differentiate some graphs that take a mapping, and gives zeros
through a NamedTuple, without a word. Of a batch of N prompts with G completions each, T = N*P + N*G*R positions,
prompts first.
"""

NAMES = ("prefix_ids", "prefix_lengths", "input_ids", "lengths", "positions")
PREFIX_IDS, PREFIX_LENGTHS, INPUT_IDS, LENGTHS, POSITIONS = range(len(NAMES))
"""Entries of a batch that every decoder takes.

The ids and lengths are those of `types.TrainBatch`; POSITIONS: int32[T], each position's place in its sequence, which
chooses its rotary angle. Further arrays of the positions follow, in the order of `Decoder.row_inputs`.
"""

DROPOUT = "dropout_keys"
"""Random numbers of the positions, int32[T], of decoders that drop (`models.dropout`)."""

ROUTING = "routing"
"""Experts of the positions, int32[T, width], of decoders that replay them (`models.routing`)."""

LINES, COLUMNS, IMAGE_ROWS = "position_lines", "position_columns", "image_rows"
PATCHES, PATCH_PLACES = "patches", "patch_places"
TOWER_ROWS = "tower_rows"
"""Further inputs of decoders that see.

POSITIONS is the time of each position then; LINES, COLUMNS: int32[T], its other two numbers
(`models.vision.positions`). IMAGE_ROWS: int32[T], 0 for text; of an image's token, 1 + its row of the tower's output.
PATCHES, PATCH_PLACES: the tower's inputs. TOWER_ROWS: its output in their place, float32[rows, hidden]
(`models.vision.batch`).
"""
SEEN = (LINES, COLUMNS, IMAGE_ROWS)

COS, SIN, VIEW, COS_TABLE, SIN_TABLE, ANGLES, PLACES, SPANS, ROWS, KEPT = range(10)
"""Entries of a layer's inputs (`Decoder.layer_inputs`, `Decoder.decode_inputs`).

COS to VIEW are for halves in composed form, COS_TABLE to PLACES for halves in fused form.

COS, SIN: of each position [1, T, 1, D].
VIEW: masks and indices of the attention (`group_view`, `decode_view`).
COS_TABLE, SIN_TABLE: of all positions [positions, D].
ANGLES: int32[T or B], row of each position in the tables.
PLACES: int32[B], cache place of each slot's new position, in decode steps.
SPANS: numbers of prompt and completion tokens, int32[N + N*G], or int32[N] without completions; not in decode steps.
ROWS: further arrays of the positions, a tuple in the order of `Decoder.row_inputs`.
KEPT: the cache of the routing, int32[slots, layers with experts, size, chosen], in decode steps that record it.
"""
