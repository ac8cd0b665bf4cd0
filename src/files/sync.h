/* SPDX-License-Identifier: MIT */
/* A new or renamed file survives a crash of the system once the folder that has its name is synced to the disk, too. */
#ifndef VJP_FILES_SYNC_H
#define VJP_FILES_SYNC_H

#include "files/fail.h"

/* True where the file system or the folder's permissions do not allow it: the files themselves are whole anyway. */
bool file_sync_folder(const char *folder, char error[FILE_ERROR]);

/* The folder that `path` is in. */
bool file_sync_parent(const char *path, char error[FILE_ERROR]);

#endif
