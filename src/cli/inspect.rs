//! `gradprism inspect`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use gradprism::config::{Config, DeviceName};
use gradprism::policy::{Inspection, ParameterInfo, PolicyOptions, Problem, dtype_name};
use serde::Serialize;

use super::{DONE, FAILED};

/// Options of the inspection.
#[derive(Args)]
pub struct InspectArgs {
    /// The TorchScript file
    checkpoint: PathBuf,
    /// What the policy maps to what
    #[arg(long, value_enum, default_value_t = Kind::CausalLm)]
    kind: Kind,
    /// The shape of one observation of a step policy, such as 4 or 3,84,84; without it forward is not tried
    #[arg(long, value_delimiter = ',')]
    observation: Option<Vec<i64>>,
    /// As policy.inputs in a configuration, such as '[input_ids, attention_mask]'
    #[arg(long)]
    inputs: Option<String>,
    /// As policy.output in a configuration
    #[arg(long)]
    output: Option<String>,
    /// As policy.trainable in a configuration
    #[arg(long)]
    trainable: Option<String>,
    /// cpu, cuda, cuda:N or auto
    #[arg(long, default_value = "cpu")]
    device: String,
    /// List every parameter
    #[arg(long)]
    parameters: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    CausalLm,
    Step,
}

#[derive(Serialize)]
struct Report {
    checkpoint: PathBuf,
    forward: String,
    arguments: Option<Vec<(String, gradprism::policy::Role)>>,
    choices: Option<i64>,
    dtypes: Vec<String>,
    device: String,
    parameter_tensors: usize,
    parameters: usize,
    trainable: usize,
    tied: Vec<Vec<String>>,
    buffers: usize,
    buffer_elements: usize,
    saved_in_train_mode: bool,
    errors: Vec<String>,
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter_list: Option<Vec<ParameterInfo>>,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<u8> {
    let inspection = Inspection::run(&args.checkpoint, &options(args)?)?;
    let report = report(args, &inspection);
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        print(&mut out, &report)?;
    }
    Ok(if report.errors.is_empty() { DONE } else { FAILED })
}

/// The options go the way of a configuration, so that they mean the same.
fn options(args: &InspectArgs) -> anyhow::Result<PolicyOptions> {
    let mut overrides = vec![match args.kind {
        Kind::CausalLm => "policy.kind=causal_lm".to_owned(),
        Kind::Step => "policy.kind=step".to_owned(),
    }];
    for (key, value) in
        [("inputs", &args.inputs), ("output", &args.output), ("trainable", &args.trainable)]
    {
        overrides.extend(value.iter().map(|value| format!("policy.{key}={value}")));
    }
    let folder = std::env::current_dir().context("finding the current folder")?;
    let config = Config::parse("", "inspect", &folder, &overrides)?.resolve()?;
    let mut options = config.policy_options(DeviceName(args.device.clone()).resolve()?)?;
    options.observation_shape.clone_from(&args.observation);
    Ok(options)
}

fn report(args: &InspectArgs, inspection: &Inspection) -> Report {
    let parameters = inspection.parameters();
    let elements = |trainable_only: bool| {
        parameters
            .iter()
            .filter(|parameter| parameter.trainable || !trainable_only)
            .map(|parameter| parameter.elements)
            .sum()
    };
    let mut errors = Vec::new();
    let mut warnings = Vec::new();
    for problem in &inspection.problems {
        match problem {
            Problem::Error(message) | Problem::NotTrainable(message) => {
                errors.push(message.clone())
            }
            Problem::Warning(message) => warnings.push(message.clone()),
        }
    }
    Report {
        checkpoint: args.checkpoint.clone(),
        forward: inspection.forward.clone(),
        arguments: inspection.signature.as_ref().map(|signature| signature.arguments.clone()),
        choices: inspection.choices,
        dtypes: inspection.dtypes.iter().copied().map(dtype_name).collect(),
        device: args.device.clone(),
        parameter_tensors: parameters.len(),
        parameters: elements(false),
        trainable: elements(true),
        tied: parameters
            .iter()
            .filter(|parameter| parameter.names.len() > 1)
            .map(|parameter| parameter.names.clone())
            .collect(),
        buffers: inspection.buffers.0,
        buffer_elements: inspection.buffers.1,
        saved_in_train_mode: inspection.saved_in_train_mode,
        errors,
        warnings,
        parameter_list: args.parameters.then_some(parameters),
    }
}

fn print(out: &mut impl Write, report: &Report) -> std::io::Result<()> {
    writeln!(out, "{}", report.checkpoint.display())?;
    writeln!(out, "  {}", report.forward)?;
    for (name, role) in report.arguments.iter().flatten() {
        writeln!(out, "  passes `{name}` as {role:?}")?;
    }
    if let Some(choices) = report.choices {
        writeln!(out, "  logits over {choices} tokens or actions")?;
    }
    writeln!(
        out,
        "  {} parameters in {} tensors, {} trainable, {}; {} buffers of {} elements; on {}",
        report.parameters,
        report.parameter_tensors,
        report.trainable,
        if report.dtypes.is_empty() { "no dtype".into() } else { report.dtypes.join(" and ") },
        report.buffers,
        report.buffer_elements,
        report.device
    )?;
    for names in &report.tied {
        writeln!(out, "  tied: {}", names.join(" = "))?;
    }
    if report.saved_in_train_mode {
        writeln!(out, "  saved in train mode; used in eval mode")?;
    }
    for parameter in report.parameter_list.iter().flatten() {
        let state = if parameter.trainable { "" } else { "  not trainable" };
        writeln!(
            out,
            "    {} {:?} {}{state}",
            parameter.names.join(" = "),
            parameter.shape,
            parameter.dtype
        )?;
    }
    for warning in &report.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    for error in &report.errors {
        writeln!(out, "  error: {error}")?;
    }
    if report.errors.is_empty() && report.warnings.is_empty() {
        writeln!(out, "  no problem found")?;
    }
    Ok(())
}
