// Drafts of a slot's next tokens: the tokens that followed an earlier occurrence of the slot's last tokens.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

const int64_t kShortestKey = 2, kLongestKey = 8;  // last tokens that must occur earlier
const int64_t kFirstDraft = 2, kLongestDraft = 15;

// The texts that each slot searches, and the length limit of its next draft, set by the accepted tokens of its last drafts.
class Drafts {
 public:
  // histories int32[slots, size]: texts similar to a slot's text, and at the end its own text up to its last token; negative
  // numbers before, between and after texts. A history that ends in a negative number gives no drafts.
  Drafts(const int32_t *histories, int64_t slots, int64_t size) : texts_(slots), reach_(slots, kFirstDraft) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int32_t *text = histories + slot * size, *end = text + size;
      if (end[-1] >= 0) texts_[slot].assign(std::find_if(text, end, [](int32_t id) { return id >= 0; }), end);
    }
  }

  // Writes a draft of at most `most` tokens, which follow the longest earlier match of the last tokens, the latest if equal.
  void propose(int64_t slot, int64_t most, std::vector<int32_t> &draft) const {
    draft.clear();
    if (most <= 0) return;
    const std::vector<int32_t> &text = texts_[slot];
    const int64_t last = static_cast<int64_t>(text.size()) - 1;
    int64_t place = -1, longest = kShortestKey - 1;
    for (int64_t i = last - 1; i >= longest && longest < kLongestKey; --i) {
      if (text[i] != text[last]) continue;
      int64_t same = 1;
      while (same < kLongestKey && same <= i && text[i - same] >= 0 && text[i - same] == text[last - same]) ++same;
      if (same > longest) place = i, longest = same;
    }
    if (place < 0) return;
    const int64_t end = std::min(last, place + std::min(most, reach_[slot]));
    for (int64_t i = place + 1; i <= end && text[i] >= 0; ++i) draft.push_back(text[i]);
  }

  // Appends a token to the slot's own text.
  void add(int64_t slot, int32_t token) {
    if (!texts_[slot].empty()) texts_[slot].push_back(token);
  }

  // Updates the limit of the slot's drafts: `right` of `drafted` tokens were accepted.
  void judge(int64_t slot, int64_t drafted, int64_t right) {
    if (drafted) reach_[slot] = std::min(right == drafted ? 2 * reach_[slot] : right + 1, kLongestDraft);
  }

 private:
  std::vector<std::vector<int32_t>> texts_;
  std::vector<int64_t> reach_;
};

}  // namespace
