// Drafts of a slot's next tokens: those that followed its last ones where these came before.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

const int64_t kShortestKey = 2, kLongestKey = 8;  // last tokens that have to come before
const int64_t kFirstDraft = 2, kLongestDraft = 15;

// The texts that each slot looks in, and how far its last drafts were right: that alone decides how long the next are.
class Drafts {
 public:
  // histories int32[slots, size]: texts like a slot's, and its own at the end with the token that it has last; before,
  // between and after texts are negative numbers. One that ends in a negative number gives no drafts.
  Drafts(const int32_t *histories, int64_t slots, int64_t size) : texts_(slots), reach_(slots, kFirstDraft) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int32_t *text = histories + slot * size, *end = text + size;
      if (end[-1] >= 0) texts_[slot].assign(std::find_if(text, end, [](int32_t id) { return id >= 0; }), end);
    }
  }

  // A draft of at most `most` tokens, from where most of the last tokens came before, and of several such places the last.
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

  // The slot has one more token.
  void add(int64_t slot, int32_t token) {
    if (!texts_[slot].empty()) texts_[slot].push_back(token);
  }

  // How many tokens of a slot's draft came true.
  void judge(int64_t slot, int64_t drafted, int64_t right) {
    if (drafted) reach_[slot] = std::min(right == drafted ? 2 * reach_[slot] : right + 1, kLongestDraft);
  }

 private:
  std::vector<std::vector<int32_t>> texts_;
  std::vector<int64_t> reach_;
};

}  // namespace
