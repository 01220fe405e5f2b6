-- p50 and p99 per service and minute from the table of durations, accurate to one step, which is 4.5 percent.
WITH counted AS (
  SELECT service_name, minute, step, spans, errors,
         sum(spans) OVER (PARTITION BY service_name, minute ORDER BY step) AS up_to_here,
         sum(spans) OVER (PARTITION BY service_name, minute) AS total
  FROM durations
)
SELECT service_name, minute, max(total) AS spans, sum(errors) AS errors,
       min(CASE WHEN up_to_here >= 0.50 * total THEN power(2, (step + 0.5) / 16) / 1e6 END) AS p50_ms,
       min(CASE WHEN up_to_here >= 0.99 * total THEN power(2, (step + 0.5) / 16) / 1e6 END) AS p99_ms
FROM counted
GROUP BY service_name, minute
ORDER BY service_name, minute
