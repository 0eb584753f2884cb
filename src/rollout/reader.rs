//! Reads native JSONL, plain or compressed, and checks it. Nothing is guessed, nothing half-read.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::line::{FIELDS, Flag, Line, MARK, Number, quote_non_finite};
use super::text::TextTokenizer;
use super::{Batch, Content, Group, ReadReport, Rollouts, Trajectory};
use crate::error::{Error, Result, nearest};
use crate::policy::PolicyKind;

/// What to do about a group of one, or a missing reward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnProblem {
    /// Refuse the file.
    #[default]
    Error,
    /// Leave the trajectory out, and count it.
    Drop,
    /// Keep it, for what needs neither a baseline nor rewards. No configuration asks for it.
    #[serde(skip)]
    Keep,
}

/// How to read a rollout file.
#[derive(Clone, Debug)]
pub struct ReadOptions {
    /// Token arrays or observations and actions.
    pub kind: PolicyKind,
    /// For lines of text without ids.
    pub tokenizer: Option<PathBuf>,
    /// A group of one has no baseline.
    pub single: OnProblem,
    /// `reward: null` or NaN.
    pub missing_reward: OnProblem,
}

/// Reads a whole file: `.jsonl`, or compressed by gzip or zstd (told by its first bytes).
///
/// # Errors
/// At the first line that breaks the format, with its number and field; or if the file as a whole
/// cannot be used.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Rollouts> {
    let mut reader = Reader {
        path,
        options,
        tokenizer: options
            .tokenizer
            .as_deref()
            .map(|path| TextTokenizer::load(path, "rollouts.tokenizer"))
            .transpose()?,
        line: 0,
        groups: Vec::new(),
        index: HashMap::new(),
        ids: HashMap::new(),
        unnamed: HashSet::new(),
        optional: HashMap::new(),
        report: ReadReport::default(),
    };
    let mut input = open(path)?;
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        if input.read_until(b'\n', &mut bytes).map_err(Error::io("read", path))? == 0 {
            break;
        }
        reader.line += 1;
        let text = std::str::from_utf8(&bytes)
            .map_err(|error| reader.error("line", format!("expected UTF-8 text: {error}")))?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if !text.is_empty() {
            reader.take(text)?;
        }
    }
    reader.finish()
}

/// Opens a file for reading, through a decompressor where its first bytes name one.
pub(crate) fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = File::open(path).map_err(Error::io("read", path))?;
    let mut input = BufReader::new(file);
    let start = input.fill_buf().map_err(Error::io("read", path))?;
    let decoder: Box<dyn Read> = if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(input))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::Decoder::with_buffer(input).map_err(Error::io("decompress", path))?)
    } else {
        return Ok(Box::new(input));
    };
    Ok(Box::new(BufReader::new(decoder)))
}

struct Reader<'a> {
    path: &'a Path,
    options: &'a ReadOptions,
    tokenizer: Option<TextTokenizer>,
    line: usize,
    groups: Vec<(Option<i64>, Group)>,
    index: HashMap<(Option<i64>, String), usize>,
    /// The line of every trajectory_id.
    ids: HashMap<String, usize>,
    /// Hashes of the lines without one.
    unnamed: HashSet<u64>,
    /// For every optional field, whether the first line has it: all or none must.
    optional: HashMap<&'static str, (bool, usize)>,
    report: ReadReport,
}

impl Reader<'_> {
    fn error(&self, field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::RolloutLine {
            path: self.path.to_path_buf(),
            line: self.line,
            field: field.into(),
            problem: problem.into(),
        }
    }

    fn take(&mut self, text: &str) -> Result<()> {
        let line = self.parse(text)?;
        self.report.trajectories += 1;
        let step = line.step;
        let group_id = line.group_id.0.clone();
        self.check_identity(&line, text)?;
        self.check_uniform("step", line.step.is_some())?;
        let Some(trajectory) = self.trajectory(line)? else {
            self.report.dropped_missing_reward += 1;
            return Ok(());
        };
        if trajectory.sampled() == 0 {
            self.report.without_sampled_token += 1;
            return Ok(());
        }
        let slot = *self.index.entry((step, group_id.clone())).or_insert_with(|| {
            self.groups.push((step, Group { id: group_id, trajectories: Vec::new() }));
            self.groups.len() - 1
        });
        self.groups[slot].1.trajectories.push(trajectory);
        Ok(())
    }

    fn parse(&self, text: &str) -> Result<Line> {
        if !text.starts_with('{') {
            return Err(self.error("line", "expected one JSON object a line"));
        }
        if text.contains(MARK) {
            return Err(self.error("line", "holds the character U+F8FF, which no text needs"));
        }
        let text = quote_non_finite(text);
        let mut json = serde_json::Deserializer::from_str(&text);
        let line = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let field = error.path().to_string();
            let inner = error.into_inner();
            let mut problem = inner.to_string();
            // The position within one line is noise beside its number, but for broken JSON.
            if inner.is_data() {
                problem = problem.split(" at line ").next().unwrap_or(&problem).to_owned();
            }
            let unknown =
                problem.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
            if let Some(unknown) = unknown {
                problem = match nearest(unknown, FIELDS) {
                    Some(known) => {
                        format!("unknown; did you mean `{known}`? (other data go into `meta`)")
                    }
                    None => "unknown (other data go into `meta`)".into(),
                };
            } else if inner.is_syntax() || inner.is_eof() {
                problem = format!("expected one JSON object a line: {problem}");
            }
            let field = if field == "." { "line".into() } else { field };
            self.error(field, problem)
        })?;
        json.end().map_err(|error| {
            self.error("line", format!("expected one JSON object a line: {error}"))
        })?;
        Ok(line)
    }

    fn check_identity(&mut self, line: &Line, text: &str) -> Result<()> {
        if let Some(id) = &line.trajectory_id {
            if let Some(first) = self.ids.insert(id.0.clone(), self.line) {
                return Err(self.error(
                    "trajectory_id",
                    format!("expected a name used once, found `{}` as on line {first}", id.0),
                ));
            }
        } else {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            if !self.unnamed.insert(hasher.finish()) {
                self.report.repeated_lines += 1;
            }
        }
        Ok(())
    }

    /// A field that some lines have and others lack would mix two kinds of numbers in one mean.
    fn check_uniform(&mut self, field: &'static str, present: bool) -> Result<()> {
        let (expected, first) = *self.optional.entry(field).or_insert((present, self.line));
        if expected == present {
            return Ok(());
        }
        let (has, lacks) = if present { (self.line, first) } else { (first, self.line) };
        Err(self.error(
            field,
            format!("expected in all lines or in none; line {has} has it, line {lacks} does not"),
        ))
    }

    /// None if the reward is missing and such trajectories are dropped.
    fn trajectory(&mut self, line: Line) -> Result<Option<Trajectory>> {
        let content = match self.options.kind {
            PolicyKind::CausalLm => self.tokens(&line)?,
            PolicyKind::Step => self.steps(&line)?,
        };
        let length = content.len();
        let mask: Vec<bool> = match &line.response_mask {
            Some(mask) => {
                self.check_length("response_mask", mask.len(), length)?;
                mask.iter().map(|Flag(flag)| *flag).collect()
            }
            None => vec![true; length],
        };
        let Some((reward, token_rewards)) = self.rewards(&line, &mask)? else {
            return Ok(None);
        };
        let reasoning = line.reasoning.clone();
        for (index, (start, end)) in reasoning.iter().flatten().enumerate() {
            // An empty span is a finding: a format without anything in it.
            if start > end || *end > length {
                return Err(self.error(
                    format!("reasoning[{index}]"),
                    format!("expected 0 <= start <= end <= {length}, found [{start}, {end}]"),
                ));
            }
        }
        Ok(Some(Trajectory {
            line: self.line,
            id: line.trajectory_id.map(|id| id.0),
            content,
            reward,
            token_rewards,
            old_logprobs: self.log_probs("old_logprobs", line.old_logprobs, &mask)?,
            ref_logprobs: self.log_probs("ref_logprobs", line.ref_logprobs, &mask)?,
            sampler_logprobs: self.log_probs("sampler_logprobs", line.sampler_logprobs, &mask)?,
            values: self.numbers("values", line.values, &mask)?,
            mask,
            reasoning,
        }))
    }

    fn tokens(&self, line: &Line) -> Result<Content> {
        for (field, present) in
            [("observations", line.observations.is_some()), ("actions", line.actions.is_some())]
        {
            if present {
                return Err(self.error(
                    field,
                    "expected token arrays, since policy.kind is causal_lm; for a policy of observations set policy.kind: step",
                ));
            }
        }
        let prompt_ids = self.ids("prompt_ids", &line.prompt_ids, "prompt", &line.prompt)?;
        let response_ids =
            self.ids("response_ids", &line.response_ids, "response", &line.response)?;
        Ok(Content::Tokens { prompt_ids, response_ids })
    }

    fn ids(
        &self,
        field: &str,
        ids: &Option<Vec<i64>>,
        text_field: &str,
        text: &Option<String>,
    ) -> Result<Vec<i64>> {
        let ids = match (ids, text, &self.tokenizer) {
            (Some(ids), _, _) => ids.clone(),
            (None, Some(text), Some(tokenizer)) => {
                tokenizer.encode(text).map_err(|problem| self.error(text_field, problem))?
            }
            (None, Some(_), None) => {
                return Err(self.error(
                    field,
                    format!("expected token ids; the line has only `{text_field}`, for which rollouts.tokenizer must name a tokenizer.json"),
                ));
            }
            (None, None, _) => {
                return Err(self.error(field, "expected an array of token ids, found none"));
            }
        };
        if ids.is_empty() {
            return Err(self.error(field, "expected at least one token id, found an empty array"));
        }
        match ids.iter().position(|id| *id < 0) {
            Some(index) => Err(self.error(
                format!("{field}[{index}]"),
                format!("expected a token id of at least 0, found {}", ids[index]),
            )),
            None => Ok(ids),
        }
    }

    fn steps(&self, line: &Line) -> Result<Content> {
        for (field, present) in [
            ("prompt_ids", line.prompt_ids.is_some()),
            ("response_ids", line.response_ids.is_some()),
        ] {
            if present {
                return Err(self.error(
                    field,
                    "expected `observations` and `actions`, since policy.kind is step; for a language model set policy.kind: causal_lm",
                ));
            }
        }
        let actions = line
            .actions
            .clone()
            .ok_or_else(|| self.error("actions", "expected an array of actions, found none"))?;
        if actions.is_empty() {
            return Err(self.error("actions", "expected at least one action, found an empty array"));
        }
        if let Some(index) = actions.iter().position(|action| *action < 0) {
            return Err(self.error(
                format!("actions[{index}]"),
                format!("expected an action of at least 0, found {}", actions[index]),
            ));
        }
        let nested = line.observations.as_ref().ok_or_else(|| {
            self.error("observations", "expected an array of one observation a step, found none")
        })?;
        let mut observations = Vec::new();
        let mut shape = Vec::new();
        flatten(nested, 0, &mut shape, &mut observations)
            .map_err(|problem| self.error("observations", problem))?;
        self.check_length("observations", shape[0] as usize, actions.len())?;
        shape.remove(0);
        Ok(Content::Steps { observations, shape, actions })
    }

    fn check_length(&self, field: &str, found: usize, expected: usize) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        let response = match self.options.kind {
            PolicyKind::CausalLm => "response_ids",
            PolicyKind::Step => "actions",
        };
        Err(self.error(
            field,
            format!("expected {expected} entries, as many as `{response}`, found {found}"),
        ))
    }

    /// An optional array over the response: finite where the policy sampled, 0 elsewhere.
    fn numbers(
        &mut self,
        field: &'static str,
        numbers: Option<Vec<Number>>,
        mask: &[bool],
    ) -> Result<Option<Vec<f64>>> {
        self.check_uniform(field, numbers.is_some())?;
        let Some(numbers) = numbers else { return Ok(None) };
        self.check_length(field, numbers.len(), mask.len())?;
        let mut checked = Vec::with_capacity(numbers.len());
        for (index, (Number(number), sampled)) in numbers.into_iter().zip(mask).enumerate() {
            if *sampled && !number.is_finite() {
                return Err(self.error(
                    format!("{field}[{index}]"),
                    format!(
                        "expected a finite number where response_mask is 1, found {}",
                        spoken(number)
                    ),
                ));
            }
            checked.push(if *sampled { number } else { 0.0 });
        }
        Ok(Some(checked))
    }

    fn log_probs(
        &mut self,
        field: &'static str,
        numbers: Option<Vec<Number>>,
        mask: &[bool],
    ) -> Result<Option<Vec<f64>>> {
        /// Log-probabilities computed in half precision may come out a little above 0.
        const ROUNDING: f64 = 1e-2;
        let numbers = self.numbers(field, numbers, mask)?;
        if let Some(index) = numbers.iter().flatten().position(|number| *number > ROUNDING) {
            let found = numbers.iter().flatten().nth(index).copied().unwrap_or_default();
            return Err(self.error(
                format!("{field}[{index}]"),
                format!("expected a log-probability, which is at most 0, found {found}"),
            ));
        }
        Ok(numbers)
    }

    /// The reward and, if given, its distribution over the response; none if it is missing and such
    /// trajectories are dropped.
    fn rewards(&self, line: &Line, mask: &[bool]) -> Result<Option<(f64, Option<Vec<f64>>)>> {
        /// How far `reward` and the sum of `token_rewards` may lie apart.
        const AGREEMENT: f64 = 1e-6;
        let token_rewards: Option<Vec<f64>> = match &line.token_rewards {
            None => None,
            Some(rewards) => {
                self.check_length("token_rewards", rewards.len(), mask.len())?;
                for (index, (Number(reward), sampled)) in rewards.iter().zip(mask).enumerate() {
                    let place = format!("token_rewards[{index}]");
                    if reward.is_infinite() {
                        return Err(
                            self.error(place, format!("expected a finite number, found {reward}"))
                        );
                    }
                    if !sampled && *reward != 0.0 && !reward.is_nan() {
                        return Err(self.error(
                            place,
                            format!("expected 0 or null where response_mask is 0, found {reward}; put it on the sampled token that earned it"),
                        ));
                    }
                }
                // A null outside the mask is no missing reward.
                Some(
                    rewards
                        .iter()
                        .zip(mask)
                        .map(|(Number(reward), sampled)| if *sampled { *reward } else { 0.0 })
                        .collect(),
                )
            }
        };
        // Equal rewards that were split differently must stay equal: what rounding did to the last
        // digits is taken off.
        let sum = token_rewards.as_ref().map(|rewards| round(rewards.iter().sum()));
        let reward = match (line.reward, sum) {
            (None, None) => {
                return Err(
                    self.error("reward", "expected `reward` or `token_rewards`, found neither")
                );
            }
            (Some(Number(reward)), None) => reward,
            (None, Some(sum)) => sum,
            (Some(Number(reward)), Some(sum)) => {
                if (reward - sum).abs() > AGREEMENT * sum.abs().max(1.0) {
                    return Err(self.error(
                        "reward",
                        format!("expected {sum}, the sum of `token_rewards`, found {reward}"),
                    ));
                }
                // A missing number in either makes the reward missing.
                if sum.is_nan() { sum } else { reward }
            }
        };
        if reward.abs() > LARGEST_REWARD {
            let expected = "expected a finite number of a size that gradients can bear";
            return Err(self.error("reward", format!("{expected}, up to 1e15, found {reward}")));
        }
        if reward.is_nan() {
            return match self.options.missing_reward {
                OnProblem::Keep => Ok(Some((reward, token_rewards))),
                OnProblem::Drop => Ok(None),
                OnProblem::Error => Err(self.error(
                    "reward",
                    "expected a number, found null or NaN; rollouts.missing_reward: drop leaves such trajectories out",
                )),
            };
        }
        Ok(Some((reward, token_rewards)))
    }

    fn finish(mut self) -> Result<Rollouts> {
        let problem = |problem: String| Error::Rollouts { path: self.path.to_path_buf(), problem };
        if self.report.trajectories == 0 {
            return Err(problem("expected one JSON object a line, found an empty file".into()));
        }
        let (groups, single): (Vec<_>, Vec<_>) = self.groups.into_iter().partition(|(_, group)| {
            group.trajectories.len() > 1 || self.options.single == OnProblem::Keep
        });
        if let (Some((_, group)), OnProblem::Error) = (single.first(), self.options.single) {
            return Err(Error::RolloutLine {
                path: self.path.to_path_buf(),
                line: group.trajectories[0].line,
                field: "group_id".into(),
                problem: format!(
                    "expected at least two trajectories in a group, found one in `{}`; rollouts.single: drop leaves such groups out",
                    group.id
                ),
            });
        }
        self.report.dropped_single = single.len();
        self.report.groups_of_unequal_prompts =
            groups.iter().filter(|(_, group)| !shares_prompt(group)).count();
        if groups.is_empty() {
            return Err(problem(format!(
                "no group of two or more trajectories is left of {} ({} without a sampled token, {} without a reward, {} alone in their group)",
                self.report.trajectories,
                self.report.without_sampled_token,
                self.report.dropped_missing_reward,
                self.report.dropped_single,
            )));
        }
        let mut groups = groups;
        groups.sort_by_key(|(step, _)| *step);
        let batches = groups
            .chunk_by(|(left, _), (right, _)| left == right)
            .map(|chunk| Batch {
                step: chunk[0].0,
                groups: chunk.iter().map(|(_, group)| group.clone()).collect(),
            })
            .collect();
        Ok(Rollouts { batches, report: self.report })
    }
}

/// Beyond this, squares of gradients leave the range of float32.
const LARGEST_REWARD: f64 = 1e15;

/// To fourteen significant digits.
fn round(value: f64) -> f64 {
    format!("{value:.13e}").parse().unwrap_or(value)
}

fn shares_prompt(group: &Group) -> bool {
    let prompt = |index: usize| match &group.trajectories[index].content {
        Content::Tokens { prompt_ids, .. } => Some(prompt_ids),
        // Noise of the environment may make first observations differ.
        Content::Steps { .. } => None,
    };
    (1..group.trajectories.len()).all(|index| prompt(index) == prompt(0))
}

fn spoken(number: f64) -> String {
    if number.is_nan() { "null or NaN".into() } else { number.to_string() }
}

/// Appends the numbers of a nested array, and checks that it is rectangular: `shape` is filled by
/// the first branch that reaches each depth.
fn flatten(
    value: &serde_json::Value,
    depth: usize,
    shape: &mut Vec<i64>,
    numbers: &mut Vec<f64>,
) -> std::result::Result<(), String> {
    if let serde_json::Value::Array(items) = value {
        let length = items.len() as i64;
        if shape.len() == depth {
            if !numbers.is_empty() {
                return Err(format!("expected a number at depth {depth}, found an array"));
            }
            shape.push(length);
        }
        if shape[depth] != length {
            return Err(format!(
                "expected arrays of equal length at depth {depth}, found {} and {length}",
                shape[depth]
            ));
        }
        return items.iter().try_for_each(|item| flatten(item, depth + 1, shape, numbers));
    }
    let Some(number) = value.as_f64() else {
        return Err(format!("expected finite numbers, found {value}"));
    };
    if depth == 0 || depth != shape.len() {
        return Err(format!("expected an array at depth {depth}, found the number {number}"));
    }
    numbers.push(number);
    Ok(())
}
