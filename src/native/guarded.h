// What both halves of the shim promise: no exception leaves them. A function returns nullptr, or a
// message that the caller frees with gp_free_message.
#pragma once

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>

template <typename Body>
char* guarded(Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("an exception that is no std::exception");
  }
}
