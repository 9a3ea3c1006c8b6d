// What Python calls; everything else stays inside the library.

#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))
