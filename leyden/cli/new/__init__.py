"""`leyden new`, and the project that it writes: `template/`, whose files are real ones that name it `project_name`."""
