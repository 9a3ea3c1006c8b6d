// What Python calls; everything else stays inside the library.
//
// Protected, so that a call from inside never ends up in another library that has a function of the same name
// (zlib has a `compress`, and a Python that is linked to it offers that to everybody).

#pragma once

#define EXPORT extern "C" __attribute__((visibility("protected")))
