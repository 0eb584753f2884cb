//! The command-line program; see the library for what it does.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
