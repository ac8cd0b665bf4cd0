# SPDX-License-Identifier: MIT
# Writes a C file with a hash of all sources, by which processes that train together see that they run the same code:
#
#     cmake -DROOT=DIR -DOUT=FILE -P sources_hash.cmake
#
# Flags, compilers and instruction sets are not part of it: they do not change the bits, or the first steps show it.
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/src/* ${ROOT}/include/*)
list(SORT files)
set(all "")
foreach(file IN LISTS files)
  file(SHA256 ${ROOT}/${file} hash)
  string(APPEND all "${file} ${hash}\n")
endforeach()
string(SHA256 hash "${all}")
file(WRITE ${OUT} "#include \"train/job/sources_hash.h\"\n\nconst char sources_hash[] = \"vjp-sources:${hash}\";\n")
