//! `gradprism doctor`.

use std::io::Write;

use clap::Args;
use gradprism::doctor::{Check, checks};

use super::{DONE, FAILED};

/// Options of the doctor.
#[derive(Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let checks: Vec<Check> = checks();
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &checks).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        for check in &checks {
            writeln!(out, "{:<16} {}", check.name, check.found)?;
            if let Some(remedy) = &check.remedy {
                writeln!(out, "{:<16} -> {remedy}", "")?;
            }
        }
    }
    Ok(if checks.iter().any(|check| check.is_error) { FAILED } else { DONE })
}
