// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/all_or_none.h"

#include <c10/util/Exception.h>

#include <exception>

#include "zero/base/error_text.h"
#include "zero/comm/row_communicator.h"

namespace zero {

std::vector<std::string> run_on_all_ranks(Communicator& control, const std::string& what,
                                          const std::function<std::string()>& body) {
  // '+' and what body() returned, '-' and its error, or '?' and its CommunicationError.
  std::string text;
  try {
    text = c10::str("+", body());
  } catch (const std::exception& error) {
    text = (is_of_communication(error) ? "?" : "-") + error_text(error);
  } catch (...) {  // The others wait for this text, whatever an object of the user throws.
    text = c10::str("-", kNoStdException);
  }
  std::vector<std::string> texts = control.all_gather_text(text, what);
  std::vector<int> failed;  // for a reason of their own
  for (size_t r = 0; r < texts.size(); ++r) {
    if (texts[r][0] == '-') failed.push_back(static_cast<int>(r));
  }
  for (const char kind : {'-', '?'}) {
    for (size_t r = 0; r < texts.size(); ++r) {
      if (texts[r][0] != kind) continue;
      const bool own = static_cast<int>(r) == control.rank();
      throw_error(kind == '?' || RowCommunicator(control).are_newcomers(failed),
                  c10::str("rank ", control.rank(), ": ", what,
                           own ? std::string(" failed: ")
                               : c10::str(" was given up by all ranks because of rank ", r, ": "),
                           texts[r].substr(1)));
    }
  }
  for (std::string& t : texts) t.erase(0, 1);
  return texts;
}

}  // namespace zero
