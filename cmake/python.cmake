# SPDX-License-Identifier: MIT
# The Python package: a C module on the limited API, so that one file serves every Python from 3.11 on, beside libvjp and
# the program. The libraries know nothing of Python. In the build tree the package is in python/, for PYTHONPATH;
# pyproject.toml makes wheels of the component "python".
set(VJP_PYTHON auto CACHE STRING "The Python package: auto, on, off")
if(VJP_PYTHON STREQUAL off OR (VJP_PYTHON STREQUAL auto AND (CMAKE_CROSSCOMPILING OR VJP_SANITIZE OR NOT PROJECT_IS_TOP_LEVEL)))
  return()
endif()
if(CMAKE_CROSSCOMPILING)
  include(cmake/python_cross.cmake)
else()
  set(vjp_python_quiet QUIET)
  if(VJP_PYTHON STREQUAL on)
    set(vjp_python_quiet REQUIRED)
  endif()
  find_package(Python 3.11 COMPONENTS Interpreter Development.Module ${vjp_python_quiet})
  if(NOT Python_Development.Module_FOUND)
    message(STATUS "Python package: not built, no headers of Python 3.11 or later (Debian: python3-dev)")
    return()
  endif()
endif()
message(STATUS "Python package: python/, with the headers of Python ${Python_VERSION}")

file(GLOB python_c_files CONFIGURE_DEPENDS python/src/*.c)
set(module_kind MODULE)
if(APPLE AND VJP_ZIG) # it links no bundles; Python loads a library just as well
  set(module_kind SHARED)
endif()
add_library(vjp_python ${module_kind} ${python_c_files})
target_link_libraries(vjp_python PRIVATE vjp_flags vjp_shared)
target_include_directories(vjp_python SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
target_compile_definitions(vjp_python PRIVATE Py_LIMITED_API=0x030b0000)
# GCC would copy the two or three sizes of a shape by a string instruction, which takes longer than all else that is done
# to read an array.
target_compile_options(vjp_python PRIVATE $<$<C_COMPILER_ID:GNU>:-fno-tree-loop-distribute-patterns>)
set(module_suffix .abi3.so)
set_source_files_properties(python/src/torch.c PROPERTIES COMPILE_OPTIONS -fexceptions) # torch's pass through it
if(APPLE) # the interpreter that loads the module has the symbols
  target_link_options(vjp_python PRIVATE -undefined dynamic_lookup)
elseif(WIN32)
  set(module_suffix .pyd)
  target_link_libraries(vjp_python PRIVATE ${VJP_PYTHON_LIBRARY})
endif()
set_target_properties(vjp_python PROPERTIES PREFIX "" OUTPUT_NAME _core SUFFIX ${module_suffix}
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/python/vjp INSTALL_RPATH "${VJP_ORIGIN}")

# The package of the build tree: links to the sources, so that an edit counts at once.
file(GLOB python_files CONFIGURE_DEPENDS python/vjp/*.py python/vjp/*.pyi python/vjp/py.typed python/vjp/torch)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/python/vjp/bin)
foreach(file ${python_files})
  get_filename_component(name ${file} NAME)
  file(CREATE_LINK ${file} ${CMAKE_BINARY_DIR}/python/vjp/${name} SYMBOLIC)
endforeach()
file(CREATE_LINK ${CMAKE_BINARY_DIR}/vjp ${CMAKE_BINARY_DIR}/python/vjp/bin/vjp SYMBOLIC)

# What a wheel contains. It holds no symbolic links, so the library has only the name that programs load it by; backends
# are beside it.
if(SKBUILD)
  set_target_properties(vjp_shared PROPERTIES VERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  # Of Windows's library only the file that is loaded, not the one to link with.
  install(TARGETS vjp_python vjp_shared RUNTIME DESTINATION vjp COMPONENT python
                                        LIBRARY DESTINATION vjp COMPONENT python NAMELINK_SKIP)
  install(TARGETS vjp RUNTIME DESTINATION vjp/bin COMPONENT python)
  set_target_properties(vjp PROPERTIES INSTALL_RPATH "${VJP_ORIGIN}/..")
endif()
