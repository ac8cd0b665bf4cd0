# SPDX-License-Identifier: MIT
# A toolchain file: cross-compiles with zig cc, which carries the headers and libraries of every system that it compiles
# for (the Python package ziglang).
#
#   cmake -S . -B DIR -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DVJP_ZIG=/path/to/zig -DVJP_ZIG_TARGET=aarch64-macos
#
# Targets are written as zig writes them; x86_64-linux-gnu.2.28 is Linux with glibc 2.28 or later.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES VJP_ZIG VJP_ZIG_TARGET)
if(NOT VJP_ZIG OR NOT VJP_ZIG_TARGET MATCHES "^(x86_64|aarch64|wasm32)-(linux|macos|windows|wasi)")
  message(FATAL_ERROR "set VJP_ZIG and VJP_ZIG_TARGET; see cmake/zig.cmake")
endif()
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
if(CMAKE_MATCH_2 STREQUAL linux)
  set(CMAKE_SYSTEM_NAME Linux)
elseif(CMAKE_MATCH_2 STREQUAL windows)
  set(CMAKE_SYSTEM_NAME Windows)
elseif(CMAKE_MATCH_2 STREQUAL wasi)
  set(CMAKE_SYSTEM_NAME Generic) # CMake 3.20 does not know it
  set(CMAKE_EXECUTABLE_SUFFIX_C .wasm)
else()
  set(CMAKE_SYSTEM_NAME Darwin)
  # There is no Apple SDK to look for. 11.0 is the first system for Apple's own processors.
  set(CMAKE_OSX_SYSROOT "" CACHE STRING "")
  set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "")
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON) # Apple's tool that changes paths when installing is not here either
endif()

# CMake calls each tool by one name. They are beside the build, not in it: try_compile() has builds of its own.
set(vjp_zig_tools ${CMAKE_BINARY_DIR}/zig-tools)
if(DEFINED ENV{VJP_ZIG_TOOLS})
  set(vjp_zig_tools $ENV{VJP_ZIG_TOOLS})
endif()
set(ENV{VJP_ZIG_TOOLS} ${vjp_zig_tools})
# Without optimisation zig cc adds a sanitizer, whose library it first compiles, for 17 seconds.
set(cc_flags -fno-sanitize=undefined)
foreach(tool cc ar ranlib rc)
  file(CONFIGURE OUTPUT ${vjp_zig_tools}/${tool} CONTENT "#!/bin/sh\nexec \"${VJP_ZIG}\" ${tool} ${${tool}_flags} \"$@\"\n" @ONLY)
  file(CHMOD ${vjp_zig_tools}/${tool} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
set(CMAKE_C_COMPILER ${vjp_zig_tools}/cc)
set(CMAKE_C_COMPILER_TARGET ${VJP_ZIG_TARGET})
set(CMAKE_AR ${vjp_zig_tools}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${vjp_zig_tools}/ranlib CACHE FILEPATH "")
set(CMAKE_RC_COMPILER ${vjp_zig_tools}/rc CACHE FILEPATH "")
# This machine's strip does not know the files of the others.
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_RELEASE_INIT -s)
endforeach()

# Nothing of this machine is for that one.
set(CMAKE_FIND_ROOT_PATH ${vjp_zig_tools})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
