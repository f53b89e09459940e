//! The `starling` program. All of it is in the library, where tests and other programs can reach it.

fn main() -> std::process::ExitCode {
    starling::cli::run()
}
