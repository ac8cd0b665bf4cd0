/* SPDX-License-Identifier: MIT */
/* Unicode's normal form C: characters composed where a composed one exists, marks in canonical order. */
#ifndef VJP_TEXT_NFC_H
#define VJP_TEXT_NFC_H

#include "text/list.h"

/* Adds the normal form of a valid UTF-8 text. False: there is no memory. */
bool nfc_normalize(const char *text, size_t length, byte_list *to);

#endif
