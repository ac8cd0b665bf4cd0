/* SPDX-License-Identifier: MIT */
/* A hash of all files in src/ and include/ that this program was built from. cmake/sources_hash.cmake makes it. */
#ifndef VJP_TRAIN_JOB_SOURCES_HASH_H
#define VJP_TRAIN_JOB_SOURCES_HASH_H

extern const char sources_hash[];

#endif
