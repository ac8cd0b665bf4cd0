# SPDX-License-Identifier: MIT
# The headers of the limited API for another system, made from those of this one's Python: only pyconfig.h differs, and
# of it the limited API needs little more than sizes, which the compiler has. Windows also needs a library to link with,
# python3.dll's: the names in it are those that the headers declare. Sets Python_INCLUDE_DIRS, Python_VERSION and, for
# Windows, VJP_PYTHON_LIBRARY.
set(host_python python3)
if(Python_EXECUTABLE)
  set(host_python ${Python_EXECUTABLE})
endif()
execute_process(COMMAND ${host_python} -c "import sys, sysconfig; print(sysconfig.get_paths()['include'], '%d.%d' % sys.version_info[:2], sep=';')"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET found 0 host_headers)
list(GET found 1 Python_VERSION)
if(NOT EXISTS ${host_headers}/Python.h OR Python_VERSION VERSION_LESS 3.11)
  message(FATAL_ERROR "no headers of Python 3.11 or later in ${host_headers} (Debian: python3-dev)")
endif()
set(Python_INCLUDE_DIRS ${CMAKE_BINARY_DIR}/python-headers)
file(COPY ${host_headers}/ DESTINATION ${Python_INCLUDE_DIRS} FILES_MATCHING PATTERN "*.h")
file(WRITE ${Python_INCLUDE_DIRS}/pyconfig.h "/* Made by cmake/python_cross.cmake. */
#define SIZEOF_SHORT __SIZEOF_SHORT__
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define SIZEOF_UINTPTR_T __SIZEOF_POINTER__
#define SIZEOF_DOUBLE __SIZEOF_DOUBLE__
#define ALIGNOF_SIZE_T __SIZEOF_SIZE_T__
#define ALIGNOF_MAX_ALIGN_T __BIGGEST_ALIGNMENT__
#define HAVE_STDARG_PROTOTYPES 1
#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_LONG_LONG 1
#define HAVE_PROTOTYPES 1
#ifdef _WIN32
#define MS_WINDOWS 1
#define MS_WIN64 1
#define HAVE_DECLSPEC_DLL 1
#define Py_ENABLE_SHARED 1
#define NT_THREADS 1
#else
#define HAVE_SSIZE_T 1
#define HAVE_UNISTD_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TIME_H 1
#endif
")

if(WIN32)
  file(GLOB headers ${Python_INCLUDE_DIRS}/*.h)
  set(names "")
  foreach(header ${headers})
    file(READ ${header} text)
    string(REGEX MATCHALL "PyAPI_(FUNC|DATA)\\([^()]*\\)[ \t\n]*[A-Za-z_0-9]+" declared "${text}")
    foreach(declaration ${declared})
      string(REGEX MATCH "[A-Za-z_0-9]+$" name "${declaration}")
      if(declaration MATCHES "^PyAPI_DATA")
        string(APPEND name " DATA")
      endif()
      list(APPEND names "${name}")
    endforeach()
    # Functions that a macro renames before they are declared.
    string(REGEX MATCHALL "_Py[A-Za-z_]+_SizeT" renamed "${text}")
    list(APPEND names ${renamed})
  endforeach()
  list(REMOVE_DUPLICATES names)
  list(JOIN names "\n" names)
  file(WRITE ${CMAKE_BINARY_DIR}/python3.def "LIBRARY python3.dll\nEXPORTS\n${names}\n")
  set(VJP_PYTHON_LIBRARY ${CMAKE_BINARY_DIR}/libpython3.a)
  execute_process(COMMAND ${VJP_ZIG} dlltool -m i386:x86-64 -d ${CMAKE_BINARY_DIR}/python3.def -D python3.dll -l ${VJP_PYTHON_LIBRARY}
    COMMAND_ERROR_IS_FATAL ANY)
endif()
