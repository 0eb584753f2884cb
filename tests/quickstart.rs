//! The embedded quickstart: what it shows, and that plain PyTorch finds the same numbers.

mod common;

use std::process::Command;

use common::{assert_close, config, gradprism, stderr};
use serde_json::Value;

fn run(arguments: &[&str]) -> (tempfile::TempDir, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut command = gradprism(&["study"]);
    command.arg(config("quickstart.yaml")).arg("--out").arg(&out).args(arguments);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!stderr(&output).contains("WARN"), "{}", stderr(&output));
    let text = std::fs::read_to_string(out.join("prompts.jsonl")).unwrap();
    (folder, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

#[test]
fn the_quickstart_shows_every_kind_of_group() {
    let (folder, groups) = run(&[]);
    assert_eq!(groups.len(), 24);
    // The rollouts are the policy's own: r − 1 − log r is as small as rounding, and not below 0.
    let summary = std::fs::read_to_string(folder.path().join("out/summary.json")).unwrap();
    let summary: Value = serde_json::from_str(&summary).unwrap();
    let approx_kl = summary["steps"][0]["ratio"]["approx_kl"].as_f64().unwrap();
    assert!((0.0..1e-10).contains(&approx_kl), "{approx_kl}");
    let count = |holds: &dyn Fn(&Value) -> bool| groups.iter().filter(|group| holds(group)).count();
    let number = |group: &Value, key: &str| group[key].as_f64();
    let equal = count(&|group| number(group, "reward_variance") == Some(0.0));
    let high = count(&|group| number(group, "reward_variance") > Some(0.1));
    let significant = count(&|group| number(group, "signal_p").is_some_and(|p| p <= 0.05));
    let silent = count(&|group| number(group, "signal_p").is_some_and(|p| p > 0.2));
    let dominated = count(&|group| number(group, "dominance") > Some(0.5));
    for (count, what) in [
        (equal, "equal rewards"),
        (high, "a high reward variance"),
        (significant, "a significant signal"),
        (silent, "rewards that vary, and no significant signal"),
        (dominated, "a regularizer that dominates"),
    ] {
        assert!(count >= 4, "{count} groups have {what}");
    }
}

/// The configuration file spells out every default: leaving them all out changes nothing.
#[test]
fn the_commented_fields_are_the_defaults() {
    let load = |text: &str| {
        let folder = config("");
        gradprism::config::Config::parse(text, "test", &folder, &[]).unwrap().resolve().unwrap()
    };
    let text = std::fs::read_to_string(config("quickstart.yaml")).unwrap();
    let short = "
policy: {checkpoint: quickstart/policy.pt, reference: quickstart/reference.pt}
rollouts: {path: quickstart/rollouts.jsonl}
algorithm: {kl: {coef: 0.01}, entropy_coef: 0.01}
";
    assert_eq!(load(&text), load(short));
}

#[test]
fn plain_pytorch_finds_the_same_numbers() {
    let Some(python) = common::python("plain_pytorch_finds_the_same_numbers") else { return };
    // In float64 on both sides, and with the reference's log-probabilities as the file rounds them.
    let (_folder, groups) =
        run(&["--set", "policy.dtype=float64", "--set", "policy.reference=null"]);
    let script = config("quickstart/make_quickstart.py");
    let output = Command::new(python).arg(script).arg("--check").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with("group "));
    let names: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let mut compared = 0;
    for (group, line) in groups.iter().zip(lines) {
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(group["group_id"], cells[0]);
        for (name, key) in [
            ("reward_mean", "reward_mean"),
            ("reward_var", "reward_variance"),
            ("task_norm", "task_norm"),
            ("signal_sq", "signal_sq"),
            ("noise_sq", "noise_sq"),
            ("signal_p", "signal_p"),
            ("kl_unit", "kl_unit_norm"),
            ("entropy_unit", "entropy_unit_norm"),
            ("reg_norm", "reg_norm"),
            ("dominance", "dominance"),
            ("tokens", "tokens"),
        ] {
            let column = names.iter().position(|found| *found == name).unwrap();
            let expected: f64 = cells[column].parse().unwrap();
            // Where there is no task gradient there is no test; the script calls that 1.
            let found = group[key].as_f64().unwrap_or(1.0);
            let what = format!("{} {name}", cells[0]);
            // Five digits are printed.
            assert_close(found, expected, 6e-5, expected.abs().max(1e-12), &what);
            compared += 1;
        }
    }
    assert_eq!(compared, 24 * 11);
}
